"""How sm90_grouped is launched: by which tile, and which blocks share the rows of a."""

import itertools
from pathlib import Path
from unittest import mock

import pytest

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
        ((8, 8192, 4096, 14336), Tile(256, 128), True),
        ((8, 8192, 4096, 8192), Tile(128, 192), True),
        ((8, 8192, 4096, 8064), Tile(128, 128), False),  # a short k
        ((8, 1024, 4096, 14336), Tile(128, 128), False),  # groups that do not fill a tile
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


def test_the_chosen_tile_is_about_as_fast_as_the_fastest_of_those_that_were_timed():
    pytest.importorskip("torch")
    from bench.grouped_choice import judged

    found = list(judged(sorted(RESULTS.glob("*-tiles.jsonl"))))
    for held_out, mode in itertools.product((False, True), ("row", "block")):
        losses = [one.loss for one in found if (one.held_out, one.record["mode"]) == (held_out, mode)]
        assert len(losses) == (46 if held_out else 38)
        assert sum(losses) / len(losses) < 1.018
        assert max(losses) < 1.14
