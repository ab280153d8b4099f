"""Tiles of sm90_tiled that two warpgroups make by turns, on an H100 or H200: blocks that have many of them, every end."""

from functools import cache

import pytest

from fp8core.kernels.gemm.sm90 import tiled, tiled_cost
from gemm.test_ending_gpu import Ended
from gemm.test_generic_gpu import FN
from gemm.test_sm90_tiled import CHANNEL, MIXED, TENSOR
from gemm.test_sm90_tiled_gpu import Tiled

pytestmark = pytest.mark.gpu
TILES = [tile for tile in tiled_cost.TILES if tile.pingpong]
COOPERATIVE = tiled_cost.Tile(128, 128)
ENDS = [
    ("bfloat16", "", "silu", 0.0, 1000),
    ("bfloat16", "float32", "gelu", 1.0, 1000),
    ("bfloat16", "float32", "gelu_tanh", 0.0, 1001),
    ("float16", "float32", "", -0.5, 1001),
    ("float32", "float32", "gelu", 0.0, 1000),
    ("float32", "", "silu", -0.5, 1000),
    ("float32", "float32", "", 1.0, 1001),
]


def on(problem, multiprocessors):
    """Return a problem for so many multiprocessors: the fewer, the more tiles each block has."""
    return problem._replace(target=problem.target._replace(multiprocessors=multiprocessors))


@cache
def ended(n, out, bias, amax=False):
    made = Ended((300, n, 272), ("row", "row"), (0, 0, 0), out, bias, amax=amax)
    made.made.problem = on(made.made.problem._replace(use_fast_accum=True), 5)
    if tiled.SM90_TILED.refusal(made.made.problem._replace(alignment=16)) is not None:  # odd n is for direct launches
        pytest.skip("the device has no wgmma")
    return made


@pytest.mark.parametrize(("out", "bias", "activation", "beta", "n"), ENDS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_any_ending_has_the_bits_of_cooperative_tiles(tile, out, bias, activation, beta, n):
    made = ended(n, out, bias)
    made.check(tiled.SM90_TILED, activation, beta, lambda p: tiled.tiled(p, tile))
    p = made.made.problem._replace(activation=activation, beta=beta)
    got, want = (made.run(tiled.tiled(p, one), p) for one in (tile, COOPERATIVE))
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("n", [1008, 1001])
@pytest.mark.parametrize("activation", ["", "gelu"])
def test_codes_and_the_largest_value(activation, n):
    for bias, amax in (("float32", True), ("", False)):
        made = ended(n, FN, bias, amax)
        p = made.made.problem._replace(activation=activation)
        want = made.run(tiled.tiled(p, COOPERATIVE), p)
        largest = float(made.made.amax[0]) if amax else 0.0
        for tile in set(TILES) & set(tiled_cost.tiles(p)):
            assert (made.run(tiled.tiled(p, tile), p) == want).all(), tile
            assert not amax or float(made.made.amax[0]) == largest > 0, tile


@pytest.mark.parametrize("modes", [CHANNEL, TENSOR, MIXED], ids="-".join)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_blocks_of_any_number_of_tiles(tile, modes):
    """Blocks whose last tile is the first or the second warpgroup's; none, one and many for the second."""
    for m, n, k in ((700, 1000, 616), (129, 1160, 128), (1000, 777, 2048)):
        case = Tiled(m, n, k, modes, seed=m)
        case.tile = COOPERATIVE
        case.check()
        want = case.run()
        case.tile = tile
        for multiprocessors in (1, 2, 3, 5, 7, 132):
            case.problem = on(case.problem, multiprocessors)
            assert bool((case.run() == want).all()), (m, multiprocessors)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_results_do_not_change_from_run_to_run(tile):
    case = Tiled(4096, 6144, 1024, CHANNEL, seed=4)
    case.tile = COOPERATIVE
    want = case.run()
    case.tile = tile
    assert all(bool((case.run() == want).all()) for _ in range(20))
