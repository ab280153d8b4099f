"""How sm90_grouped is launched: by which tile, and which blocks share the rows of a."""

from collections import defaultdict
from pathlib import Path
from statistics import mean
from unittest import mock

import pytest

import fp8core
from fp8core.kernels.gemm.sm90.tiled import loads_scale_tiles
from fp8core.kernels.gemm.sm90.tiled_cost import Tile
from fp8core.kernels.grouped.sm90 import plan_grouped
from fp8core.problem import GroupedMm, ScaledMm
from fp8core.runtime import jit
from support.targets import H200

E4M3 = "float8_e4m3fn"
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "grouped"


def product(groups, m, n, k):
    """Return a grouped product with a scale for each row and channel."""
    one = ScaledMm(
        *(H200, m, n, k, E4M3, E4M3, "bfloat16", "row", "row", (1, 0), (1, 0)),
        *("", False, False, True, False, k, k, n, 16),
    )
    return GroupedMm(groups, one, n * k, n, 0)


@pytest.mark.parametrize(
    ("shape", "tile", "shared"),
    [
        ((8, 8192, 4096, 14336), Tile(128, 128), True),
        ((8, 8192, 4096, 8192), Tile(128, 192), True),
        ((8, 1200, 4096, 14336), Tile(192, 128), True),
        ((8, 8192, 4096, 8064), Tile(128, 128), False),  # a short k
        ((8, 1024, 4096, 14336), Tile(128, 128), False),  # groups that do not fill two slices
        ((8, 8192, 4096, 14336), Tile(64, 128), False),  # one consumer warpgroup
        ((8, 8192, 4224, 14336), Tile(128, 128), False),  # an odd number of tiles side by side
    ],
    ids=str,
)
def test_pairs_of_blocks_share_long_rows(shape, tile, shared):
    with mock.patch.object(jit, "prepare") as prepare:
        plan_grouped(product(*shape), tile)
    constants = prepare.call_args.args[3]
    assert constants["FP8_CLUSTER"] == (2 if shared else 1)
    assert prepare.call_args.kwargs["cluster"] == 2  # neighbours, also of blocks that share nothing
    (blocks, _, _), _ = prepare.return_value.bind_args.call_args.args
    assert blocks == H200.multiprocessors


@pytest.mark.parametrize(
    ("n", "k", "bias"),
    [
        (256, 512, ""),
        (2880, 2880, ""),  # 23 x 23 scales of a weight: every second weight's begin between multiples of 8 bytes
        (2882, 2880, "bfloat16"),
        (2881, 2880, "float32"),
    ],
)
def test_scales_of_a_are_loaded_by_tma_wherever_those_of_a_weight_begin(n, k, bias):
    blocks = -(-k // 128)
    a, weight = fp8core.ArraySpec((1024, k), E4M3), fp8core.ArraySpec((8, n, k), E4M3)
    scale_a = fp8core.ArraySpec((1024, blocks), "float32", strides=(1, 1024))
    scale_b = fp8core.ArraySpec((8, -(-n // 128), blocks), "float32")
    given = {"bias": fp8core.ArraySpec((8, n), bias)} if bias else {}
    ends = fp8core.ArraySpec((8,), "int32")
    explained = fp8core.explain(
        fp8core.grouped_scaled_mm_nt, a, weight, scale_a, scale_b, offs=ends, target="sm_90", **given
    )
    assert loads_scale_tiles(explained.problem.product)


@pytest.mark.parametrize(
    ("run", "bounds"),
    [
        (4, {"row": (38, 1.018, 1.10), "block": (38, 1.009, 1.10)}),
        (5, {"row": (38, 1.015, 1.14)}),
        (6, {"row": (46, 1.016, 1.12), "block": (46, 1.004, 1.08)}),
        # drawn products, in most of which experts are not equally likely, as the choice takes them to be
        (7, {"row": (78, 1.043, 1.29), "block": (82, 1.027, 1.21)}),
    ],
)
def test_the_chosen_tile_is_about_as_fast_as_the_fastest_of_those_that_were_timed(run, bounds):
    """``bounds``: by mode of scales, the number of products, and the most that their mean and worst loss may be."""
    pytest.importorskip("torch")
    from bench.grouped_choice import judged

    losses = defaultdict(list)
    for one in judged(RESULTS / f"2026-11-28-nvidia-h200-{run}-tiles.jsonl"):
        losses[one.record["mode"]].append(one.loss)
    assert {mode: len(some) for mode, some in losses.items()} == {mode: bound[0] for mode, bound in bounds.items()}
    for mode, (_, average, worst) in bounds.items():
        assert mean(losses[mode]) < average, mode
        assert max(losses[mode]) < worst, mode
