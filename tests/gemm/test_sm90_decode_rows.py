"""Products of sm_90a with the rows of a on wgmma's M side: layouts anywhere, results on an H100 or H200."""

import itertools

import pytest

from fp8core.kernels.gemm.sm90 import decode as sm90_decode
from fp8core.kernels.gemm.sm90 import decode_config, decode_rows_config
from support.sm90_products import FORMATS, OUTS, SMALL, Case, problem
from support.targets import H200

LAYOUTS = [(split, tiles) for split in range(1, 9) for tiles in (1, 2, 4, 8) if split * tiles <= 8]
"""Parts of k, and tiles of a cluster that share what they load of a."""
MODES = [*itertools.product(("tensor", "row"), repeat=2), ("group", "block")]


def layout(split, tiles=1, clusters=2, a_stages=4, channels=128):
    return decode_config.DecodeConfig(
        split, clusters, 1, 1, 1, a_stages, multicast_tiles=tiles, warpgroup_channels=channels, rows_first=True
    )


@pytest.mark.parametrize("scale_rows", [0, 128])
@pytest.mark.parametrize("split", range(1, 9))
def test_a_layout_fits_with_its_reduction(split, scale_rows):
    plan = layout(split, a_stages=8)
    depth = decode_config.stages(plan, 64, scale_rows, H200)
    asked = decode_config.dynamic_bytes(plan, 64, scale_rows, depth, H200)
    assert depth * 16 >= 96
    buffers = (split - 1) * -(-16 // split) * 8 * 64 * 4
    rings = depth * 128 * 128 + plan.a_stages * 64 * 128
    assert decode_config.ring_bytes(plan, 64, depth) == rings + buffers + 1024 <= asked
    assert asked + decode_config.fixed_bytes(plan, 64, scale_rows, depth) + 1024 <= H200.shared_bytes + 1024


@pytest.mark.gpu
@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize("chosen", LAYOUTS, ids=str)
def test_layouts_in_every_mode(chosen, modes):
    """Tiles that no cluster divides, k-blocks that no block divides, a few tiles of every cluster."""
    case = Case(48 + chosen[0], 2600, 3000, modes, gap=16, seed=chosen[0])
    for clusters, a_stages in ((1, 2), (2, 4), (3, 5)):
        if chosen[1] * clusters * 128 < 2600 + 128:
            case.check(layout(*chosen, clusters=clusters, a_stages=a_stages))


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [64, 72, 80, 104, 120, 128])
def test_tiles_of_every_width(channels):
    """Their blocks of scales begin anywhere in a tile, and so does the end of the channels."""
    for n, shape in itertools.product((1500, 1001), ((1, 1), (3, 1), (2, 4))):
        for modes in (("row", "row"), ("group", "block")):
            Case(50, n, 1300, modes, bias="bfloat16", seed=n).check(layout(*shape, clusters=1, channels=channels))
    Case(50, 20 * channels, 1300, out="float32", seed=5).check(layout(3, clusters=1, channels=channels))
    for n, ldo, shift in OUTS:
        Case(64, n, 1500, ldo=ldo, shift=shift, seed=ldo).check(layout(3, clusters=1, channels=channels))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [*range(1, 65)])
def test_every_number_of_rows(m):
    for modes in (("row", "row"), ("group", "block")):
        Case(m, 1000, 1500, modes, bias="bfloat16", seed=m).check(layout(3))
    Case(m, 500, 1500, ("row", "tensor"), out="float32", seed=m).check(layout(2))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 7, 63, 129, 255, 257, 1001])
@pytest.mark.parametrize("k", [256, 272, 1000, 3000])
def test_ragged_shapes(n, k):
    for out, modes in (("float32", ("row", "row")), ("bfloat16", ("group", "block")), ("float16", ("tensor", "row"))):
        for shape in ((2, 1), (1, 1), (2, 4)):
            Case(40, n, k, modes, out=out, size=SMALL[out], seed=n + k).check(layout(*shape, clusters=1))


@pytest.mark.gpu
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", ["", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("a", "b"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_any_dtype_of_operands_bias_and_result(out, bias, a, b):
    assert {a, b} <= set(FORMATS)
    for modes in (("row", "row"), ("group", "block")):
        Case(33, 520, 1280, modes, a=a, b=b, out=out, bias=bias, size=SMALL[out], seed=3).check(layout(2))


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", [(2, 1), (5, 1), (8, 1), (2, 4), (3, 2)], ids=str)
def test_equal_inputs_give_equal_bits_in_every_launch(chosen):
    """What a block reads before another has written it would differ from launch to launch."""
    case = Case(64, 5000, 4096, seed=7)
    plan = layout(*chosen, clusters=5)
    first = case.run(plan=plan)
    case.check(plan)
    assert all(bool((case.run(plan=plan) == first).all()) for _ in range(50))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [17, 64])
def test_a_row_has_its_bits_whatever_the_others_are(m):
    case, plan = Case(m, 3000, 4096, seed=8), layout(4, clusters=5)
    full = case.run(plan=plan)
    case.a[1:] = case.a[: m - 1].copy()
    assert bool((case.run(plan=plan)[0] == full[0]).all())


BLOCKS = {"scale_a": "group", "scale_b": "block"}


@pytest.mark.parametrize(
    ("m", "n", "k", "fields", "channels", "split"),
    [
        (64, 7168, 16384, {}, 112, 2),
        (33, 5120, 25600, {}, 80, 2),
        (32, 5120, 25600, {}, 64, 8),
        (64, 13312, 16384, {}, 104, 1),
        (64, 57344, 8192, {}, 112, 1),
        (64, 57344, 8192, BLOCKS, 128, 2),
        (64, 36864, 7168, {}, 96, 1),
        (64, 53248, 16384, {}, 120, 2),
        (64, 8192, 8192, BLOCKS, 128, 2),
        (64, 8192, 8192, {"scale_a": "group", "scale_b": "group"}, 64, 1),
        (64, 1024, 4096, {}, 64, 4),
        (64, 1024, 4096, BLOCKS, 64, 4),
        (64, 2112, 7168, BLOCKS, 64, 3),
        (64, 24576, 1536, BLOCKS, 64, 1),
        (64, 1024, 384, BLOCKS, 64, 1),
    ],
)
def test_it_is_chosen_where_it_was_measured_to_be_faster(m, n, k, fields, channels, split):
    made = problem(m, n, k, **fields)
    chosen = sm90_decode.config_for(made)
    assert (chosen.warpgroup_channels, chosen.split_k) == (channels, split)
    assert chosen.rows_first == (channels > 64 or (n, k) in ((1024, 4096), (2112, 7168)))
    assert sm90_decode.config_for(made._replace(prefetch_weight=False))._replace(
        ctas_per_sm=0, a_stages=0
    ) == chosen._replace(ctas_per_sm=0, a_stages=0)


@pytest.mark.parametrize("multiprocessors", [132, 114, 78, 16])
@pytest.mark.parametrize(("n", "k"), [(1, 128), (1280, 4096), (5376, 21504), (57344, 8192), (13312, 16384)])
def test_every_layout_that_is_compared_covers_the_product(n, k, multiprocessors):
    target = H200._replace(multiprocessors=multiprocessors)
    for blockwise in (False, True):
        plans = [*decode_rows_config.layouts(n, k, target, blockwise)]
        assert plans
        for plan in plans:
            assert 1 <= plan.split_k <= min(8, -(-k // 128))
            most = decode_config.clusters_at_once(target)[plan.cluster]
            assert 1 <= plan.clusters <= min(-(-n // plan.tile), most)
            assert plan.prefetch_k_blocks < decode_config.stages(plan, 64, 128, H200)
            assert 0 < decode_rows_config.estimate(n, k, plan, target, blockwise) < 1e6


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")])
@pytest.mark.parametrize(("n", "k"), [(10240, 5120), (5376, 21504), (7168, 16384)])
def test_what_is_chosen_by_the_table(n, k, modes):
    for m in (33, 64):
        case = Case(m, n, k, modes, seed=m)
        assert sm90_decode.config_for(case.problem).rows_first
        case.check()
    case.check_a_written_weight()


def test_batch_invariant_products_keep_their_kernel():
    for m, (n, k) in itertools.product((1, 17, 33, 64), ((13312, 16384), (5376, 21504), (28672, 4096))):
        assert not sm90_decode.config_for(problem(m, n, k, batch_invariant=True)).rows_first
