"""sm90_tiled on the CPU: its loads, barriers and stores as the kernel has them, Hopper's instructions by hopper.h."""

import numpy as np
import pytest

from fp8core.kernels.gemm.sm90 import tensor_maps, tiled, tiled_cost
from fp8core.problem import ScaledMm, Target
from fp8core.runtime import sources
from support import reference
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.hopper import encode_map, tiled_text
from support.emulation.products import ROUNDING, SUMS, codes
from support.emulation.running import FLOATS, empty, matrix

SHAPE = (300, 336, 400)
TILES = [
    *(tile for tile in tiled_cost.TILES if tile.pingpong),
    *(tiled_cost.Tile(rows, columns) for rows, columns in ((256, 128), (128, 192))),
]

BLOCK_TILES = [tiled_cost.Tile(rows, columns) for rows, columns in ((256, 128), (128, 192), (64, 96))]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return the kernel's text with hopper.h in the place of PTX."""
    return tiled_text(tmp_path_factory.mktemp("hopper"))


@pytest.fixture
def hopper(emulator, text, monkeypatch):
    """Return the emulator, which compiles that text, and maps that it understands."""
    monkeypatch.setattr(sources, "flatten", lambda platform, source: text)
    monkeypatch.setattr(tensor_maps, "encode", encode_map)
    monkeypatch.setattr(tensor_maps, "_SHARED", {})
    return emulator


def product(memory, tile, multiprocessors, activation="", beta=0.0):
    """Return what a launch writes, and what is expected of it: scales by row, a bias, and what out held before."""
    m, n, k = SHAPE
    target = Target("cuda", 90, 0, multiprocessors, 32, 227 << 10)
    random = np.random.default_rng(7)
    codes_a, codes_b = codes(m, k, "float8_e4m3fn", 0), codes(n, k, "float8_e4m3fn", 1)
    scale_a, scale_b = (((random.random(size) + 0.5) / 64).astype(np.float32) for size in (m, n))
    bias = random.standard_normal(n).astype(np.float32)
    before = random.standard_normal((m, n)).astype(FLOATS["bfloat16"])
    a, b = matrix(memory, codes_a, k), matrix(memory, codes_b, k)
    out = empty(memory, (m, n), FLOATS["bfloat16"], n)
    out.values[...] = before
    problem = ScaledMm(
        *(target, m, n, k, "float8_e4m3fn", "float8_e4m3fn", "bfloat16", "row", "row", (1, 0), (1, 0)),
        *("float32", False, False, True, False, k, k, n, 16),
    )._replace(activation=activation, beta=beta)
    vectors = [memory.array(x) for x in (scale_a, scale_b, bias)]
    launch = tiled.tiled(problem, tile)
    launch(0, a.pointer, b.pointer, *(x.ctypes.data for x in vectors), out.pointer, 0, 0, 0)
    numbers = reference.decode(codes_a, "float8_e4m3fn"), reference.decode(codes_b, "float8_e4m3fn").T
    want = reference.scaled_mm(*numbers, scale_a[:, None], scale_b[None, :], bias)
    value = want + beta * before.astype(np.float64)
    magnitude = reference.scaled_mm(*map(np.abs, (*numbers, scale_a[:, None], scale_b[None, :])))
    return out.values.astype(np.float64), value if not activation else reference.activated(value, activation), magnitude


@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_product_is_near_float64(hopper, tile, multiprocessors):
    """Blocks of one tile, of some and of all; rows, channels and k that are no whole tiles."""
    with hopper.watch() as memory:
        got, want, magnitude = product(memory, tile, multiprocessors)
    assert (np.abs(got - want) <= ROUNDING["bfloat16"] * np.abs(want) + SUMS * (magnitude + 1)).all()


@pytest.mark.parametrize(("activation", "beta"), [("silu", 0.0), ("", -0.5), ("gelu_tanh", 1.0)])
@pytest.mark.parametrize("tile", [TILES[0], TILES[-2]], ids=str)
def test_ends(hopper, tile, activation, beta):
    with hopper.watch() as memory:
        got, want, magnitude = product(memory, tile, 2, activation, beta)
    assert (np.abs(got - want) <= 1.01 * ROUNDING["bfloat16"] * np.abs(want) + SUMS * (magnitude + 9)).all()


@pytest.mark.parametrize(("multiprocessors", "early"), [(1, True), (4, False)])
@pytest.mark.parametrize("tile", BLOCK_TILES, ids=str)
def test_block_scales_of_more_k_blocks_than_a_warp_has_lanes(hopper, tile, multiprocessors, early):
    """TMA loads those of a; a warp loads those of the weight, some of which change within a tile."""
    m, n, k = 132, 200, 33 * 128 + 16
    with hopper.watch() as memory:
        random = np.random.default_rng(3)
        codes_a, codes_b = codes(m, k, "float8_e4m3fn", 0), codes(n, k, "float8_e4m3fn", 1)
        scale_a, scale_b = (((random.random(size) + 0.5) / 64).astype(np.float32) for size in ((34, m), (2, 34)))
        a, b = matrix(memory, codes_a, k), matrix(memory, codes_b, k)
        out = empty(memory, (m, n), FLOATS["bfloat16"], n)
        problem = ScaledMm(
            *(Target("cuda", 90, 0, multiprocessors, 32, 227 << 10), m, n, k, "float8_e4m3fn", "float8_e4m3fn"),
            *("bfloat16", "group", "block", (1, m), (34, 1), "", False, False, True, False, k, k, n, 16),
        )._replace(prefetch_weight=early)
        assert tiled.loads_scale_tiles(problem)
        vectors = [memory.array(x) for x in (scale_a, scale_b)]
        tiled.tiled(problem, tile)(0, a.pointer, b.pointer, *(x.ctypes.data for x in vectors), 0, out.pointer, 0, 0, 0)
        got = out.values.astype(np.float64)
    wide_a = reference.decode(codes_a, "float8_e4m3fn") * np.repeat(scale_a.T.astype(np.float64), 128, 1)[:, :k]
    spread = np.repeat(np.repeat(scale_b.astype(np.float64), 128, 0)[:n], 128, 1)[:, :k]
    wide_b = reference.decode(codes_b, "float8_e4m3fn") * spread
    want, magnitude = wide_a @ wide_b.T, np.abs(wide_a) @ np.abs(wide_b).T
    assert (np.abs(got - want) <= ROUNDING["bfloat16"] * np.abs(want) + SUMS * magnitude).all()
