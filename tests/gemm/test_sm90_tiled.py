"""The row "sm90_tiled": its tiles, what it refuses, and when it is chosen."""

from types import SimpleNamespace
from unittest import mock

import pytest

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.sm90 import decode_config, tiled, tiled_choice, tiled_cost
from fp8core.kernels.gemm.table import SCALED_MM
from support.sm90_products import problem
from support.targets import H200

ROW = tiled.SM90_TILED
BLOCK, GROUP = ("group", "block"), ("group", "group")
TENSOR, CHANNEL, MIXED = ("tensor", "tensor"), ("row", "row"), ("row", "tensor")
MODES = (BLOCK, GROUP, CHANNEL, TENSOR, MIXED)
SHAPES = [(1, 16), (576, 7168), (2112, 7168), (4096, 4096), (7168, 16384), (28672, 4096)]


def scaled(m, n, k, modes, **fields):
    return problem(m, n, k, scale_a=modes[0], scale_b=modes[1], **fields)


@pytest.mark.parametrize("m", [1, 65, 128, 129, 256, 300, 512, 4096])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("modes", MODES, ids="-".join)
def test_the_chosen_tile_is_one_that_is_compiled(m, n, k, modes):
    for fast in (True, False):
        asked = scaled(m, n, k, modes, use_fast_accum=fast)
        chosen = tiled_choice.fastest(asked)
        assert chosen in tiled_cost.candidates(asked)
        assert tiled_cost.us(asked) == tiled_cost.us(asked, chosen) > 0


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("bias", ["", "float32"])
@pytest.mark.parametrize("modes", MODES, ids="-".join)
def test_a_layout_fits_into_shared_memory(modes, bias, out):
    asked = scaled(300, 64, 4096, modes, bias=bias, out=out)  # so few tiles that blocks may share any
    along_k = modes[0] == "group"
    for tile in tiled_cost.candidates(asked):
        layout = tiled.Layout.of(asked, tile)
        assert layout.stages >= 3, tile
        assert tile.columns * ITEMSIZE[out] % layout.piece_bytes == 0
        words = tile.rows + (tile.columns if modes == GROUP else 32) if along_k else 1
        vectors = 2 * ((0 if along_k else tile.rows + tile.columns) + (tile.columns if bias else int(along_k)))
        fixed = layout.stages * (4 * words + 16) + 4 * vectors + 32
        ring = layout.stages * tile.stage_bytes
        staging = tile.groups * layout.buffers * tiled.STAGED_ROWS * layout.piece_bytes
        received = (tile.split_k - 1) * (tile.rows * tile.columns * 4 // tile.split_k)
        assert ring + staging + received + 1024 <= layout.dynamic_bytes
        assert layout.dynamic_bytes + fixed <= H200.shared_bytes


@pytest.mark.parametrize(
    ("shape", "measured"),
    [
        ((1755, 3324, 4480), {"128x192": 45.6, "128x128": 48.3, "128x96": 55.9, "128x160": 67.3, "128x144": 74.9}),
        ((5248, 8196, 3840), {"128x192": 288.7, "128x128": 301.3, "128x96": 360.5, "128x160": 401.9, "128x144": 485.2}),
    ],
)
def test_odd_results_take_longer_in_tiles_whose_pieces_are_narrow(shape, measured):
    """By what an H200 took; threads store a piece of 128, 64 or 32 bytes of a row at a time."""
    asked = scaled(*shape, BLOCK, alignment=8, codes_alignment=16)
    found = {str(tile): tiled_cost.us(asked, tile) for tile in tiled_cost.tiles(asked)}
    assert found == pytest.approx({**found, **measured}, rel=0.2)
    wide = min(found["128x192"], found["128x128"])
    assert all(found[tile] > 1.1 * wide for tile in ("128x96", "128x160", "128x144"))


@pytest.mark.parametrize(("out", "n"), [("bfloat16", 1 << 30), ("float32", 1 << 29)])
def test_threads_store_a_result_whose_columns_tma_cannot_count_in_bytes(out, n):
    """Its coordinates have 32 bits and a sign: it drops what a negative one asks it to store."""
    made = []
    for columns in (n - 8, n):
        asked = scaled(17, columns, 16, CHANNEL, out=out)
        tile = tiled_choice.fastest(asked)
        made.append(tiled.constants(asked, tile, tiled.Layout.of(asked, tile), scale_tiles=False)["FP8_STORE_TILES"])
    assert made == [1, 0]


@pytest.mark.parametrize("tile", tiled_cost.TILES)
def test_tiles_cover_the_result(tile):
    for m, n in ((1, 1), (128, 192), (129, 193), (1000, 7168)):
        rows, columns = -(-m // tile.rows), -(-n // tile.columns)
        assert tile.tiles(m, n) == (rows + rows % tile.cluster) * columns
        assert tile.waves(m, n, H200) * H200.multiprocessors >= tile.tiles(m, n)
        assert tile.groups * tile.m_slices * 64 == tile.rows * (2 if tile.pingpong else 1)


@pytest.mark.parametrize("multiprocessors", [132, 131, 16])
@pytest.mark.parametrize(("m", "n"), [(4096, 8192), (700, 28672), (256, 57344), (512, 8192), (1, 16)])
def test_a_grid_is_of_whole_clusters_whose_blocks_all_have_tiles(monkeypatch, m, n, multiprocessors):
    launched = []

    def prepare(*_, cluster, **__):
        return SimpleNamespace(bind_args=lambda grid, _: launched.append((grid, cluster)))

    monkeypatch.setattr(tiled.jit, "prepare", prepare)
    asked = scaled(m, n, 1024, BLOCK, target=H200._replace(multiprocessors=multiprocessors))
    for tile in tiled_cost.candidates(asked):
        tiled.tiled(asked, tile)
        ((blocks, *rest), cluster) = launched.pop()
        assert rest == [1, 1]
        assert blocks % cluster == 0 < blocks <= tile.tiles(m, n) * tile.split_k
        assert blocks <= multiprocessors
        assert cluster in (tile.cluster, 2) if tile.split_k == 1 else cluster == tile.split_k
        assert tile.split_k == 1 or blocks == tile.tiles(m, n) * tile.split_k


@pytest.mark.parametrize(
    ("m", "n", "k", "fields", "split"),
    [
        (128, 576, 7168, {}, True),
        (65, 256, 7168, {}, True),
        (128, 1280, 8192, {}, True),
        (64, 576, 7168, {}, False),  # few rows
        (128, 576, 7168, {"beta": 1.0}, False),
        (128, 576, 256, {}, False),  # no k to divide
        (4096, 4096, 4096, {}, False),  # enough tiles
        (512, 4096, 4096, {}, False),
    ],
)
@pytest.mark.parametrize("modes", MODES, ids="-".join)
def test_a_tile_is_shared_where_tiles_are_few_and_k_is_long(m, n, k, fields, split, modes):
    asked = scaled(m, n, k, modes)._replace(**fields)
    assert (tiled_choice.fastest(asked).split_k > 1) == split
    for tile in tiled_cost.split_tiles(asked):
        clusters = decode_config.clusters_at_once(asked.target)[tile.split_k]
        assert tile.tiles(m, n) <= clusters, "all blocks run at a time"
        assert tile.split_k * tiled_cost.LEAST_K_BLOCKS * 128 < k + 128


@pytest.mark.parametrize("tile", tiled_cost.SPLIT_TILES, ids=str)
def test_an_unsplit_product_has_the_blocks_of_a_split_one(tile):
    for m, n, k in ((65, 576, 7168), (300, 300, 1040), (1000, 16, 20000)):
        asked = scaled(m, n, k, CHANNEL)
        alone, own = tiled_cost.unsplit(asked, tile), tile._replace(split_k=1)
        assert own.tiles(m, alone.n) == tile.tiles(m, n) * tile.split_k
        assert ceil_div(alone.k, 128) == ceil_div(ceil_div(k, 128), tile.split_k)
        assert (alone.k - k) % 128 == 0, "rows cross cache lines alike"
        assert tiled_cost.us(asked, tile) > tiled_cost.us(alone, own)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"alignment": 1, "codes_alignment": 8, "out_alignment": 16}, "a and b at addresses and in rows aligned to 16"),
        ({"alignment": 1, "codes_alignment": 16}, "divisible by the size of its elements, got bfloat16 aligned to 1"),
        ({"batch_invariant": True}, "batch"),
        ({"out": "float8_e4m3fnuz"}, "e4m3fn or e5m2"),
        ({"k": 1000, "lda": 1000}, "multiples of 16"),
    ],
)
def test_it_says_what_it_cannot_do(fields, words):
    asked = scaled(300, 4096, 4096, BLOCK)
    assert ROW.refusal(asked) is None
    assert words in ROW.refusal(asked._replace(**fields))


@pytest.mark.parametrize(
    ("m", "fields"),
    [
        (64, {}),
        (4096, {"n": 6144}),
        (130, {"n": 8192, "k": 8192}),
        (4096, {"scale_a": "row", "scale_b": "row"}),
        (4096, {"scale_a": "row", "scale_b": "row", "n": 4095, "ldo": 4095}),
        (4096, {"scale_a": "tensor", "scale_b": "tensor", "out": "float8_e4m3fn"}),
    ],
)
def test_it_competes_by_its_estimate(m, fields):
    asked = scaled(m, 4096, 4096, BLOCK, scale_a_strides=(1, m))._replace(**fields)
    asked = asked._replace(ldo=fields.get("ldo", asked.n), lda=asked.k, ldb=asked.k)
    assert ROW.refusal(asked) is None
    assert ROW.reservation(asked) is None
    assert ROW.us(asked) == min(tiled_cost.us(asked, tile) for tile in tiled_cost.candidates(asked)) > 0
    assert ROW.name in [choice.kernel for choice in SCALED_MM.candidates(asked)]


def test_rows_that_are_not_there_cost_nothing_and_rows_that_are_not_aligned_something():
    whole = scaled(64, 4096, 4096, CHANNEL)
    tile = tiled_cost.Tile(64, 64)
    assert tiled_cost.us(whole._replace(m=33), tile) < tiled_cost.us(whole, tile)
    assert tiled_cost.us(whole._replace(k=4096 - 16), tile) > tiled_cost.us(whole, tile)


@pytest.mark.parametrize("fields", [{}, {"batch_invariant": True, "m": 300}])
def test_few_rows_and_a_batch_that_must_not_matter_have_the_kernel_of_few_rows(fields):
    assert SCALED_MM.explain(scaled(64, 4096, 4096, BLOCK)._replace(**fields)).chosen == "sm90_decode"


@pytest.mark.parametrize(
    ("m", "tile", "boxes"),
    [
        (300, tiled_cost.Tile(128, 128), (128, 128, 64)),
        (20, tiled_cost.Tile(128, 128), (24, 128, 64)),  # a box with the rows of a, rounded up to 8
        (300, tiled_cost.Tile(128, 128, cluster=2), (128, 64, 64)),
        (300, tiled_cost.Tile(128, 128, split_k=2), (128, 128, 16)),
    ],
    ids=str,
)
def test_maps_have_the_strides_of_operands_and_the_boxes_of_tiles(m, tile, boxes):
    one = problem(m, 1000, 2000, lda=2032, ldb=2048, ldo=1024, scale_a="group", scale_b="block")
    one = one._replace(scale_a_strides=(1, 304), scale_b_strides=(16, 1))
    layout = tiled.Layout.of(one, tile)
    with mock.patch.object(tiled, "tensor_maps") as maps, mock.patch.object(tiled, "shared_maps") as words:
        tiled.maps_of(one, tile, layout, weight_rows=1000, scale_tiles=True)
    a_rows, columns, stored = boxes
    assert {call.args for call in maps.call_args_list} == {
        (m, 2000, 2032, a_rows),
        (1000, 2000, 2048, columns),
        (m, 2 * 1000, 2 * 1024, stored, layout.piece_bytes),
    }
    assert words.call_args.args[1:] == (16, m, 4 * 304, 1, tile.rows)
