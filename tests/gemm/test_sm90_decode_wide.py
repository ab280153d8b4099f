"""Products of 65 to 256 rows with a weight at any address on Hopper: their layouts, which take it, and results."""

from functools import partial

import pytest

from fp8core.kernels.gemm.sm90.decode import SCALE_ROWS
from fp8core.kernels.gemm.sm90.decode_config import dynamic_bytes, ring_bytes, stages, width
from fp8core.kernels.gemm.sm90.decode_unaligned import decode_unaligned, in_few_panels
from fp8core.kernels.gemm.sm90.decode_unaligned_config import panel_of
from fp8core.kernels.gemm.sm90.residues import phases_of
from fp8core.kernels.gemm.table import COPIES, SCALED_MM
from gemm.test_sm90_decode_unaligned import FN, problem
from gemm.test_sm90_decode_unaligned_gpu import CUT_OFF, MODES, operands  # noqa: F401

SCALES = [("row", "row"), ("group", "block"), ("group", "group")]


@pytest.mark.parametrize("scales", SCALES, ids="-".join)
def test_more_rows_choose_it_where_a_copy_of_the_weight_takes_longer(scales):
    """As a sweep on an H200 had it: a large weight takes longer to copy, many results of a short k longer to store."""
    large, short = partial(problem, n=12345, k=6008, scales=scales), partial(problem, n=14137, k=883, scales=scales)
    for m in (65, 96, 97, 128, 129, 192):
        assert SCALED_MM.explain(large(m)).chosen == "sm90_decode_unaligned"
    for p in (short(128), short(200), large(257)):
        assert SCALED_MM.explain(p).chosen == "realigned"


def test_more_rows_choose_it_where_nothing_can_be_copied():
    p = problem(100, 1 << 20, 40001)
    assert COPIES.refusal(p) is not None
    assert SCALED_MM.explain(p).chosen == "sm90_decode_unaligned"


@pytest.mark.parametrize("prefetches", [True, False])
@pytest.mark.parametrize("scales", SCALES, ids="-".join)
@pytest.mark.parametrize(("n", "k"), [(5, 3), (4975, 11869), (28672, 4097), (12345, 6008), (200, 16001), (70001, 130)])
def test_a_layout_of_more_rows_has_room(n, k, scales, prefetches):
    """A warpgroup awaits a k-block before it gives one up, and all blocks of the first turn are there at once."""
    for m, side in ((65, 96), (96, 96), (97, 128), (128, 128), (129, 96), (192, 96), (193, 128), (256, 128)):
        p = problem(m, n, k, scales=scales, prefetch_weight=prefetches)
        config, scale_rows = in_few_panels(p), SCALE_ROWS.get(scales[1], 0)
        depth = stages(config, side, scale_rows, p.target)
        assert depth >= 2
        assert ring_bytes(config, side, depth) <= dynamic_bytes(config, side, scale_rows, depth, p.target)
        assert config.panels == (1 if m <= 128 else 2)
        assert width(panel_of(p, config.panels).m) == side
        assert config.cluster * config.clusters * config.panels <= p.target.multiprocessors
        assert config.split_k <= -(-k // 128)
        assert config.phases == phases_of(p.ldb)


@pytest.mark.gpu
@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize(
    ("m", "n", "k", "offsets", "out"),
    [
        (65, 1003, 4101, (0, 0, 0), "bfloat16"),
        (96, 5000, 1026, (0, 2, 0), "float32"),
        (97, 333, 260, (4, 0, 1), FN),
        (128, 2570, 11361, (3, 1, 2), "float16"),
        (128, 70, 5, (1, 15, 0), "bfloat16"),
        (129, 777, 1795, (3, 5, 2), "float32"),
        (173, 4975, 11869, (4, 4, 4), FN),
        (193, 5321, 4100, (0, 4, 0), "float16"),
        (256, 1003, 257, (1, 0, 0), "bfloat16"),
    ],
)
def test_more_rows_in_one_pass(operands, m, n, k, offsets, out, modes):
    made = operands((m, n, k), modes, offsets, out, "float32", amax=True)
    made.check(decode_unaligned(made.problem, in_few_panels(made.problem)), CUT_OFF)
