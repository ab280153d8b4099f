"""Products of the row "sm90_tiled" on an H100 or H200, against float64."""

import itertools

import pytest

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.gemm.sm90 import tiled, tiled_choice, tiled_cost
from gemm.test_sm90_tiled import BLOCK, CHANNEL, GROUP, MODES, ROW
from support.sm90_products import SMALL, Case


class Tiled(Case):
    """The case by this row, of a given tile if there is one; the result stands between guarded bytes."""

    kernel = ROW
    tile = None
    GUARD = 4096

    def launch(self, plan):
        return tiled.tiled(self.problem, plan or self.tile)

    def run(self, stream=None, plan=None):
        cp = self.cp
        row = self.ldo * ITEMSIZE[self.out_name]
        memory = cp.full(self.m * row + 2 * self.GUARD, 0xFF, cp.uint8)
        storage = memory[self.GUARD : self.GUARD + self.m * row]
        at = cp.cuda.get_current_stream() if stream is None else stream
        bias = self.bias.data.ptr if self.bias is not None else 0
        scales = (scale.data.ptr for scale in self.scales)
        launch = self.launch(plan)
        launch(at.ptr, self.a.data.ptr, self.b.data.ptr, *scales, bias, storage.data.ptr, 0, 0, 0)
        assert bool((memory[: self.GUARD] == 0xFF).all())
        assert bool((memory[-self.GUARD :] == 0xFF).all())
        return storage.reshape(self.m, row)


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [BLOCK, GROUP, CHANNEL], ids="-".join)
@pytest.mark.parametrize("tile", tiled_cost.TILES, ids=str)
def test_every_tile_at_ragged_extents(tile, modes):
    """Ragged ends of m, n and k; a tile, several of them, and three or more of a block, of one, two and three k-blocks."""
    many = ((1500, 8192, 384), (1500, 8200, 256), (1500, 8193, 112))
    for m, n, k in ((3, 136, 16), (65, 8, 100), (77, 1001, 1000), (300, 1000, 616), *many):
        case = Tiled(m, n, k, modes, gap=16 * (m % 2), seed=m)
        if tile not in tiled_cost.tiles(case.problem):
            pytest.skip("this tile's sums and scales together are more than the registers hold")
        case.tile = tile
        case.check()


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [BLOCK, GROUP, CHANNEL], ids="-".join)
@pytest.mark.parametrize("tile", tiled_cost.SPLIT_TILES, ids=str)
def test_blocks_that_share_a_tile(tile, modes):
    """Rows of no, some and all warps; parts of k of equal and of different sizes; the same bits each time."""
    for m, n, k in ((65, 8, 512), (77, 1001, 656), (300, 200, 4240), (130, 75, 1296)):
        case = Tiled(m, n, k, modes, gap=16 * (m % 2), seed=m)
        if tile._replace(split_k=1) not in tiled_cost.tiles(case.problem):
            pytest.skip("this tile's sums and scales together are more than the registers hold")
        case.tile = tile
        case.check()
        first = case.run()
        assert all(bool((case.run() == first).all()) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", tiled_cost.TILES, ids=str)
def test_scales_of_many_k_blocks_that_tma_loads(tile):
    """Of one to five chunks of 32 k-blocks, for one tile of a block and for several."""
    for m, n, k in ((300, 1001, 4240), (64, 136, 4096), (1500, 8200, 640), (516, 8193, 4112), (4, 200, 16400)):
        case = Tiled(m, n, k, BLOCK, bias="float32" if m == 300 else "", seed=m + 1)
        if tile not in tiled_cost.tiles(case.problem):
            pytest.skip("this tile's sums and scales together are more than the registers hold")
        assert tiled.loads_scale_tiles(case.problem)
        case.tile = tile
        case.check()


@pytest.mark.gpu
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", ["", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("a", "b"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_any_dtype_of_operands_bias_and_result(out, bias, a, b):
    for n, modes in itertools.product((520, 333), (BLOCK, CHANNEL)):
        Tiled(200, n, 640, modes, a=a, b=b, out=out, bias=bias, size=SMALL[out], seed=3).check()


@pytest.mark.gpu
@pytest.mark.parametrize("out", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("n", "columns"), [(520, 256), (528, 192), (333, 160), (1040, 128), (100, 96)])
@pytest.mark.parametrize("modes", [BLOCK, CHANNEL], ids="-".join)
@pytest.mark.parametrize("split_k", [1, 4])
def test_codes_and_the_largest_value_are_those_of_the_float32_result(split_k, modes, n, columns, out):
    if 128 * columns > tiled_cost.MOST_SPLIT and split_k > 1:
        pytest.skip("this tile is not shared")
    import ml_dtypes
    import numpy as np

    case = Tiled(200, n, 640, modes, out="float32", bias="float32", seed=n)
    case.tile = tiled_cost.Tile(128, columns, split_k=split_k)
    values = case.run().view(np.float32)[:, :n].get()
    cp, scale = case.cp, np.float32(np.abs(values).max() / 300)  # some are above the largest e4m3
    case.problem = case.problem._replace(out=out, out_scale=True, amax=True)
    storage = cp.full((200, n), 0xFF, cp.uint8)
    out_scale, amax = cp.asarray([scale / 2]), cp.full(1, 7e9, cp.float32)
    pointers = (case.a, case.b, *case.scales, case.bias, storage, out_scale, amax)
    case.launch(None)(cp.cuda.get_current_stream().ptr, *(x.data.ptr for x in pointers), 0)
    dtype = getattr(ml_dtypes, out)
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    scaled_values = values * (np.float32(1) / (scale / np.float32(2)))
    want = np.clip(scaled_values, -largest, largest).astype(dtype).view(np.uint8)
    assert (storage.get() == want).all()
    assert amax.get()[0] == np.abs(values).max()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [65, 67, 127, 129, 255, 258, 511, 1000])
def test_any_number_of_rows_is_near_float64(m):
    for modes in MODES:
        Tiled(m, 1016, 1024 + 16 * (m % 7), modes, seed=m).check()


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("k", [4096, 21504, 53248])
def test_long_sums(fast, k):
    Tiled(130, 264, k, CHANNEL, fast=fast, seed=k).check()


@pytest.mark.gpu
def test_without_fast_accumulation_a_long_sum_has_the_error_of_fp32():
    cp = Tiled(1, 8, 16, CHANNEL).cp
    errors = {}
    for fast in (True, False):
        case = Tiled(130, 264, 53248, CHANNEL, out="float32", fast=fast, seed=1)
        case.tile = tiled_cost.Tile(64, 64)  # in one sum: the parts of a split k are shorter
        got = case.run().view(cp.float32)[:, : case.n].astype(cp.float64)
        errors[fast] = float(cp.linalg.norm(got - case.want) / cp.linalg.norm(case.want))
    assert errors[False] < 1e-3 < errors[True]


@pytest.mark.gpu
@pytest.mark.parametrize("span", [1e-23, 1e-15, 1e23])
@pytest.mark.parametrize("modes", MODES, ids="-".join)
def test_extreme_scales(span, modes):
    Tiled(130, 640, 1024, modes, span=span, seed=5).check()


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [BLOCK, GROUP, CHANNEL], ids="-".join)
@pytest.mark.parametrize(("m", "n", "k"), [(512, 6144, 4096), (96, 8192, 8192), (1000, 7168, 2048)])
def test_equal_inputs_give_equal_bits_by_any_tile(m, n, k, modes):
    """By any that divides k alike: the sums of a split k are in another order, which no tile changes."""
    case = Tiled(m, n, k, modes, seed=2)
    case.check()
    alone = tiled_cost.tiles(case.problem)
    shared = [tile for tile in tiled_cost.SPLIT_TILES if tile._replace(split_k=1) in alone]
    for split_k in (1, *tiled_cost.SPLITS):
        case.tile = tiled_cost.Tile(128, 128, split_k=split_k)
        first = case.run()
        for tile in (*alone, *shared):
            if tile.split_k == split_k:
                case.tile = tile
                assert bool((case.run() == first).all()), tile


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [BLOCK, CHANNEL], ids="-".join)
def test_equal_rows_have_equal_bits_in_any_batch(modes):
    """By tiles that blocks do not share: the sums of a split k are in another order."""
    case = Tiled(1000, 1160, 2048, modes, seed=2)
    case.tile = tiled_cost.Tile(128, 128)
    full = case.run()
    for m in (1, 65, 128, 129, 300, 999):
        case.problem, case.m = case.problem._replace(m=m), m
        case.tile = next(tile for tile in tiled_choice.by_cost(case.problem) if tile.split_k == 1)
        assert bool((case.run() == full[:m]).all()), m


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [BLOCK, CHANNEL], ids="-".join)
def test_results_do_not_change_from_run_to_run(modes):
    case = Tiled(4096, 6144, 1024, modes, seed=4)
    first = case.run()
    assert all(bool((case.run() == first).all()) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [BLOCK, CHANNEL], ids="-".join)
def test_a_weight_that_the_kernel_before_wrote(modes):
    Tiled(300, 8192, 1024, modes, seed=9).check_a_written_weight()


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [BLOCK, CHANNEL], ids="-".join)
def test_an_early_read_waits_for_what_the_launch_before_it_waited_for(modes):
    Tiled(300, 16384, 8192, modes, seed=6).check_a_weight_written_by_a_kernel_that_does_not_wait()
