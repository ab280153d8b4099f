"""How sm90_grouped is launched: by which tile, and which blocks share the rows of a."""

from collections import defaultdict
from pathlib import Path
from statistics import mean
from unittest import mock

import pytest

import fp8core
from fp8core.kernels.gemm.requirements import MOST_COUNTED
from fp8core.kernels.gemm.sm90 import tiled, tiled_cost
from fp8core.kernels.gemm.sm90.tiled import loads_scale_tiles
from fp8core.kernels.gemm.sm90.tiled_cost import Tile
from fp8core.kernels.grouped.args import MOST_GROUPS, capacity, most_row_tiles, table_bytes
from fp8core.kernels.grouped.generic import GENERIC_GROUPED, HOST, grid
from fp8core.kernels.grouped.sm90 import SM90_GROUPED, candidates, plan_grouped
from fp8core.problem import GroupedMm, ScaledMm
from fp8core.runtime import jit
from fp8core.target import HOST as ON_THE_HOST
from support.targets import H200, MI300, on

E4M3 = "float8_e4m3fn"
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "grouped"


def product(groups, m, n, k):
    """Return a grouped product with a scale for each row and channel."""
    one = ScaledMm(
        *(H200, m, n, k, E4M3, E4M3, "bfloat16", "row", "row", (1, 0), (1, 0)),
        *("", False, False, True, False, k, k, n, 16),
    )
    return GroupedMm(groups, one, n * k, n, 0)


def refusal(row, *, target=H200, group=None, **changes):
    """Return why a row does not take a product of 8 groups with changes, of one group or of all."""
    good = product(8, 1024, 2048, 512)
    of_all = {"groups": 8, "weight_stride": good.weight_stride, **(group or {})}
    return row.refusal(good._replace(product=good.product._replace(target=target, **changes), **of_all))


ANY_ROW = [
    ({"a": "float8_e5m2", "b": "float8_e5m2"}, "e5m2"),
    ({"scale_dtype": "float8_e8m0fnu"}, "takes scales of float32, got float8_e8m0fnu"),
]
ON_A_GPU = [
    *ANY_ROW,
    ({"m": MOST_COUNTED + 1}, f"needs m, n and k of at most {MOST_COUNTED}, got m={MOST_COUNTED + 1}"),
    ({"group": {"groups": MOST_GROUPS + 1}}, f"needs at most {MOST_GROUPS} groups, got {MOST_GROUPS + 1}"),
]
ON_HOPPER = [
    *ON_A_GPU,
    ({"target": MI300}, "needs cuda, got gfx942"),
    ({"target": H200._replace(arch=100)}, "needs wgmma (sm_90), got sm_100"),
    ({"b": "float8_e4m3fnuz"}, "got a float8_e4m3fn and b float8_e4m3fnuz"),
    ({"alignment": 8, "codes_alignment": 8}, "needs a and b at addresses and in rows aligned to 16 bytes, got 8"),
    ({"lda": 520}, "multiples of 16, got k=512 lda=520"),
    ({"ldb": 520, "group": {"weight_stride": 2048 * 520}}, "multiples of 16, got k=512 lda=512 ldb=520"),
    ({"alignment": 1, "codes_alignment": 16}, "needs out at an address divisible by the size of its elements"),
    ({"vectors_alignment": 2}, "needs scales and bias at addresses divisible by 4, got 2"),
    ({"group": {"weight_stride": 2048 * 512 + 16}}, "needs weights of groups that follow each other"),
    ({"group": {"weight_stride": 0}}, "needs weights of groups that follow each other"),
    ({"ldb": 528}, "got 1048576 elements from one to the next for n=2048 with rows of 528"),
    ({"n": 1 << 28, "group": {"weight_stride": 1 << 37}}, "got 8 groups of n=268435456 with m=1024"),
    ({"m": 1 << 30, "n": 1 << 15, "group": {"weight_stride": 1 << 24}}, "got 8 groups of n=32768 with m=1073741824"),
]
REFUSED = [
    *((HOST, {"target": ON_THE_HOST, **changes}, words) for changes, words in ANY_ROW),
    *((GENERIC_GROUPED, changes, words) for changes, words in ON_A_GPU),
    (GENERIC_GROUPED, {"m": 1 << 30, "n": 1 << 24}, "needs at most 2147483647 blocks of"),
    *((SM90_GROUPED, changes, words) for changes, words in ON_HOPPER),
]


@pytest.mark.parametrize(("row", "changes", "words"), REFUSED)
def test_what_a_row_does_not_take(row, changes, words):
    assert words in refusal(row, **changes)


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (HOST, {"target": ON_THE_HOST}),
        (GENERIC_GROUPED, {"group": {"groups": MOST_GROUPS}}),
        (GENERIC_GROUPED, {"ldb": 520, "alignment": 1, "vectors_alignment": 1, "group": {"weight_stride": 0}}),
        (SM90_GROUPED, {"group": {"groups": MOST_GROUPS}}),
        (SM90_GROUPED, {"group": {"groups": 1, "weight_stride": 0}}),
        (SM90_GROUPED, {"alignment": 1, "codes_alignment": 16, "out_alignment": 2}),
        (SM90_GROUPED, {"ldb": 528, "group": {"weight_stride": 2048 * 528}}),
    ],
)
def test_what_a_row_takes(row, changes):
    assert refusal(row, **changes) is None


@pytest.mark.parametrize(("groups", "holds"), [(0, 64), (1, 64), (64, 64), (65, 128), (1023, 1024), (1024, 1024)])
def test_the_table_of_groups_has_room_for_them_and_the_end(groups, holds):
    problem = product(groups, 1024, 2048, 512)
    assert (capacity(problem), table_bytes(problem)) == (holds, 8 * (holds + 1))
    with mock.patch.object(jit, "prepare") as prepare:
        plan_grouped(problem, Tile(128, 128))
    assert prepare.call_args.args[3]["FP8_GROUP_TABLE"] == holds


@pytest.mark.parametrize(
    ("groups", "m", "tiles"),
    [(8, 0, 0), (8, 3, 3), (8, 8, 8), (8, 8 + 60, 8), (8, 8 + 61, 9), (1, 1, 1), (1, 61, 1), (1, 62, 2), (1, 123, 3)],
)
def test_tiles_of_64_rows_wherever_groups_end(groups, m, tiles):
    assert most_row_tiles(product(groups, m, 2048, 512), 64) == tiles


@pytest.mark.parametrize(
    ("target", "m", "side", "threads"),
    [
        (H200, 8 * 128, 128, 256),
        (H200, 8 * 128 - 1, 64, 128),
        (on(0x1100), 8 * 128, 64, 128),
        (MI300, 8 * 128, 128, 256),
    ],
    ids=str,
)
def test_the_fallback_has_large_tiles_where_groups_fill_them_and_registers_hold_them(target, m, side, threads):
    problem = product(8, m, 2048, 512)
    problem = problem._replace(product=problem.product._replace(target=target, use_fast_accum=False))
    assert grid(problem) == (most_row_tiles(problem, side) * 2048 // side, threads)


@pytest.mark.parametrize(("m", "n", "blocks"), [(1, 128, 2), (1, 256, 2), (3, 128, 4), (8192, 4096, 132)])
def test_blocks_of_a_launch_are_whole_clusters(m, n, blocks):
    with mock.patch.object(jit, "prepare") as prepare:
        plan_grouped(product(8, m, n, 16384), Tile(128, 128, cluster=2))
    (launched, _, _), _ = prepare.return_value.bind_args.call_args.args
    assert launched == blocks


def test_the_table_of_groups_takes_memory_from_the_ring():
    """Blocks have all shared memory: with as many stages as without groups, they could not be launched."""
    small, large = product(64, 8192, 4096, 4096), product(1024, 8192, 4096, 4096)
    for tile in candidates(large):
        laid = tiled.Layout.of(large.product, tile, table_bytes(large))
        static = tiled.STATIC_BYTES + 4 * 2 * (tile.rows + tile.columns) + table_bytes(large)
        assert laid.dynamic_bytes + static <= H200.shared_bytes, tile
        with mock.patch.object(jit, "prepare") as prepare:
            plan_grouped(large, tile)
            assert prepare.call_args.kwargs["shared_bytes"] == laid.dynamic_bytes
    assert candidates(small) == candidates(large)


@pytest.mark.parametrize(("out", "bias"), [("bfloat16", ""), ("float32", "float32")])
def test_candidates_are_tiles_of_one_block_with_one_slice_a_warpgroup(out, bias):
    problem = product(8, 8192, 4096, 4096)
    found = candidates(problem._replace(product=problem.product._replace(out=out, bias=bias)))
    assert found
    assert {(tile.cluster, tile.m_slices, tile.pingpong, tile.split_k) for tile in found} == {(1, 1, False, 1)}


BLOCKS = {"scale_a": "group", "scale_b": "block", "scale_a_strides": (1, 8192), "scale_b_strides": (32, 1)}
FULL = {"out": "float32", "bias": "float32"}


@pytest.mark.parametrize(
    ("changes", "spill"),
    [
        (FULL, set()),
        ({"use_fast_accum": False}, set()),
        ({"use_fast_accum": False, "out": "float32"}, {(192, 128)}),
        (BLOCKS, set()),
        ({**BLOCKS, "scale_a_strides": (32, 1)}, {(192, 128)}),  # which threads load
        ({**BLOCKS, "out": "float32"}, set()),
        ({**BLOCKS, "bias": "float32"}, set()),
        ({**BLOCKS, **FULL}, {(128, 96), (128, 128)}),
    ],
)
def test_tiles_for_even_waves_and_those_without_registers_for_groups_are_no_candidates(changes, spill):
    problem = product(8, 8192, 4096, 4096)
    problem = problem._replace(product=problem.product._replace(**changes))
    single = {tile for tile in tiled_cost.tiles(problem.product) if tile.cluster == tile.m_slices == 1}
    left_out = {tile for tile in single if not tile.pingpong} - set(candidates(problem))
    even_waves = {(rows, columns) for rows in (128, 192) for columns in (80, 112)}
    assert {(tile.rows, tile.columns) for tile in left_out} - even_waves == spill
    assert not even_waves & {(tile.rows, tile.columns) for tile in candidates(problem)}


def test_the_arguments_of_groups_and_the_maps_of_all_weights():
    problem = product(8, 8192, 4096, 14336)._replace(scale_stride=4352, bias_stride=5000)
    with mock.patch.object(jit, "prepare") as prepare, mock.patch.object(tiled, "tensor_maps") as maps:
        plan_grouped(problem, Tile(128, 128))
    _, numbers = prepare.return_value.bind_args.call_args.args
    assert numbers.group == (0, 8, 4096 * 14336, 4352, 5000)
    boxes = {call.args[:4] for call in maps.call_args_list}
    assert (8 * 4096, 14336, 14336, 128) in boxes  # the weight
    assert (8192, 14336, 14336, 64) in boxes  # a, of which each block of a pair loads half


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
