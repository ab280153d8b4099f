"""The fallback products: any shape, address, stride, format and mix of scales, by the matrix instructions of any GPU.

If the GPU has warp-level instructions for both formats, these multiply the codes. Otherwise codes become 16-bit floats
in registers, exactly: fp16 on NVIDIA GPUs, bf16 on AMD's. Two kernels share the loads, conversions, instructions and
the epilogue: one for few rows, which streams the weight without shared memory, and one for many rows, with tiles in
shared memory.
"""

from typing import Final, NamedTuple

from fp8core import host
from fp8core.features import features
from fp8core.kernels.encodings import FORMAT, RESULT, TYPE, ceil_div, power_of_two
from fp8core.kernels.gemm.args import Matmul, MatmulArgs, MatmulLaunch, ending, ready
from fp8core.kernels.gemm.requirements import (
    AMD_FORMATS,
    ANY_OPERANDS,
    COUNTABLE,
    OCP_FORMATS,
    few_rows,
    grid_fits,
)
from fp8core.kernels.gemm.scales import is_along_k
from fp8core.kernels.requirements import ON_A_GPU, ON_THE_HOST
from fp8core.problem import BLOCK, ScaledMm
from fp8core.runtime import jit
from fp8core.runtime.args import Float32, Pointer
from fp8core.table import Kernel, Launch
from fp8core.target import Target

SIDE: Final = 16
"""Rows and columns of a matrix instruction."""
SIDES: Final = (16, 32, 64)
"""Rows of a block of generic_decode."""
MOST_ROWS: Final = SIDES[-1]
WARPS: Final = (4, 8)
WARPS_IN_FLIGHT: Final = 8
"""Warps per multiprocessor that are enough: with as many, blocks get fewer warps, or more channels
(experiments/2026-11-any-shape)."""


class ClearArgs(NamedTuple):
    """The arguments of clear_amax."""

    amax: Pointer


class GenericArgs(NamedTuple):
    """The arguments of generic_decode and generic_mma."""

    matmul: MatmulArgs
    out_scale: Pointer
    amax: Pointer
    beta: Float32


class Tile(NamedTuple):
    """The results of a block of generic_mma, and how many tiles of 16 x 16 each of its warps makes."""

    rows: int
    cols: int
    warp_rows: int
    warp_cols: int

    def warps(self) -> int:
        """Return the warps of a block."""
        return self.rows * self.cols // (SIDE * self.warp_rows * SIDE * self.warp_cols)

    def blocks(self, m: int, n: int) -> int:
        """Return how many blocks cover a result."""
        return ceil_div(m, self.rows) * ceil_div(n, self.cols)


TILES: Final = {32: (Tile(128, 128, 4, 2), Tile(64, 64, 2, 2)), 64: (Tile(128, 128, 4, 4), Tile(64, 64, 2, 4))}
"""Tiles of generic_mma by the threads of a warp: a large one, and one for results too small to fill a GPU with that."""
SMALL_COST: Final = 0.4
"""The time of a small tile beside others, as a fraction of that of a large one (estimated)."""


def is_rdna(target: Target) -> bool:
    """Return whether the target is an RDNA GPU, where a lane holds two or four times as much of an operand."""
    return target.platform == "hip" and target.warp == 32


def is_direct(p: ScaledMm) -> bool:
    """Return whether the GPU has warp-level instructions for codes of both formats."""
    known = AMD_FORMATS if p.target.platform == "hip" else OCP_FORMATS
    return "fp8_mma" in features(p.target) and known.check(p) is None


def is_promoted(p: ScaledMm) -> bool:
    """Return whether sums are promoted, so that a lane keeps two sums of each result."""
    return is_along_k(p) or not p.use_fast_accum


def is_aligned(p: ScaledMm) -> bool:
    """Return whether all rows of codes consist of aligned 16-byte vectors."""
    return all(number % 16 == 0 for number in (max(p.alignment, p.codes_alignment), p.lda, p.ldb, p.k))


def tiles_of(p: ScaledMm) -> tuple[Tile, ...]:
    """Return the tiles whose sums fit into registers, the large one first."""
    tiles = TILES[p.target.warp]
    return tiles[1:] if is_rdna(p.target) and is_promoted(p) else tiles


def tile(p: ScaledMm) -> Tile:
    """Return the tile whose blocks take the least time in rounds over the device; a small tile's round is shorter."""
    *larger, small = tiles_of(p)
    rounds = SMALL_COST * small.blocks(p.m, p.n) / p.target.multiprocessors
    return next((t for t in larger if ceil_div(t.blocks(p.m, p.n), p.target.multiprocessors) <= rounds), small)


def plan_clear_amax(target: Target) -> Launch:
    """Return ``launch(stream, amax)``, which writes 0.0."""
    if target.platform == "host":
        return host.plan_clear_amax()
    launcher = jit.prepare(target, "gemm/clear_amax", "clear_amax", {}, ClearArgs, block=1, programmatic=True)
    return launcher.bind_args((1, 1, 1), ClearArgs(0))


def depth_of(p: ScaledMm) -> int:
    """Return how many columns of k generic_mma stages at a time.

    Loads in flight and sums have to fit into registers, and on AMD GPUs 16-bit floats into LDS.
    """
    if p.target.platform == "cuda":
        return 64 if is_aligned(p) or not is_promoted(p) else 32
    return 64 if is_aligned(p) and is_direct(p) else 32


def mma_grid(p: ScaledMm) -> tuple[int, int]:
    """Return the blocks of a launch of generic_mma, and the threads of each."""
    return tile(p).blocks(p.m, p.n), tile(p).warps() * p.target.warp


def constants(p: ScaledMm) -> dict[str, int]:
    """Return the constants with which both kernels are compiled."""
    return {
        "FP8_A": FORMAT[p.a],
        "FP8_B": FORMAT[p.b],
        "FP8_OUT": RESULT[p.out],
        "FP8_BIAS": TYPE[p.bias] if p.bias else -1,
        "FP8_BLOCKED": int(is_along_k(p)),
        "FP8_B_BLOCK": int(p.scale_b == "block"),
        "FP8_AMAX": int(p.amax),
        "FP8_ALIGNED": int(is_aligned(p)),
        "FP8_DIRECT": int(is_direct(p)),
        **ending(p),
    }


def tile_constants(p: ScaledMm, shape: Tile) -> dict[str, int]:
    """Return the constants with which tiles in shared memory are compiled."""
    return {
        **constants(p),
        "FP8_PROMOTED": int(is_promoted(p)),
        "FP8_ROWS": shape.rows,
        "FP8_COLS": shape.cols,
        "FP8_WARP_ROWS": shape.warp_rows,
        "FP8_WARP_COLS": shape.warp_cols,
        "FP8_DEPTH": depth_of(p),
    }


def tile_bytes(p: ScaledMm, shape: Tile) -> int:
    """Return the dynamic shared memory of a block that makes such a tile."""
    return (2 if is_direct(p) else 4) * (shape.rows + shape.cols) * depth_of(p)


def plan_mma(p: ScaledMm, shape: Tile | None = None) -> Matmul:
    """Return ``round(scale_a * (scale_b * acc) + bias)``, by tiles in shared memory.

    Blocked scales are applied to every 128 of k: ``acc += scale_a * (scale_b * partial)``. FP8 results are
    ``encode(clamp(value * RN(1 / out_scale)))``; ``amax`` becomes the largest ``|value|``, NaN aside. ``k = 0`` gives
    zeros plus the bias.
    """
    shape = shape or tile(p)
    launcher = jit.prepare(
        p.target,
        "gemm/generic/mma",
        "generic_mma",
        tile_constants(p, shape),
        GenericArgs,
        block=shape.warps() * p.target.warp,
        shared_bytes=tile_bytes(p, shape),
        programmatic=True,
    )
    args = GenericArgs(MatmulArgs.of(p, ceil_div(p.m, shape.rows)), 0, 0, p.beta)
    return _ready(p, launcher.bind_args((shape.blocks(p.m, p.n), 1, 1), args))


def enough(n: int, warps_: int, target: Target) -> bool:
    """Return whether blocks of ``warps_`` warps and 16 channels each fill a device."""
    return ceil_div(n, SIDE) * warps_ >= WARPS_IN_FLIGHT * target.multiprocessors


def warps(n: int, k: int, target: Target) -> int:
    """Return the number of warps that divide ``k`` in a block: independent of m, so the bits of a row are, too."""
    wanted = next((count for count in WARPS if enough(n, count, target)), WARPS[-1])
    return min(wanted, power_of_two(ceil_div(k, BLOCK)))


class Layout(NamedTuple):
    """A block of generic_decode: rows of a, tiles of 16 channels, and the warps that divide k."""

    side: int
    tiles: int
    warps: int

    def blocks(self, m: int, n: int) -> int:
        """Return how many blocks cover a result."""
        return ceil_div(m, self.side) * ceil_div(n, SIDE * self.tiles)


def layout(p: ScaledMm) -> Layout:
    """Return the layout of a product; with two tiles per block the rows of a are read half as often."""
    sides = SIDES[:2] if is_rdna(p.target) else SIDES
    side = next((side for side in sides if side >= p.m), sides[-1])
    two = side == SIDE and is_aligned(p) and not is_rdna(p.target) and enough(ceil_div(p.n, 2), WARPS[0], p.target)
    tiles = 2 if two else 1
    return Layout(side, tiles, warps(p.n, p.k, p.target))


def decode_grid(p: ScaledMm) -> tuple[int, int]:
    """Return the blocks of a launch of generic_decode, and the threads of each."""
    shape = layout(p)
    return shape.blocks(p.m, p.n), shape.warps * p.target.warp


def plan_decode(p: ScaledMm) -> Matmul:
    """Return the same product as `plan_mma`, with the weight read once for every 64 rows."""
    shape = layout(p)
    launcher = jit.prepare(
        p.target,
        "gemm/generic/decode",
        "generic_decode",
        {**constants(p), "FP8_SIDE": shape.side, "FP8_TILES": shape.tiles, "FP8_WARPS": shape.warps},
        GenericArgs,
        block=shape.warps * p.target.warp,
        shared_bytes=4 * shape.warps * shape.side * (SIDE * shape.tiles + 4),
        programmatic=True,
    )
    args = GenericArgs(MatmulArgs.of(p, ceil_div(p.m, shape.side)), 0, 0, p.beta)
    return _ready(p, launcher.bind_args((shape.blocks(p.m, p.n), 1, 1), args))


def clearing_amax(p: ScaledMm, launch: MatmulLaunch) -> MatmulLaunch:
    """Return ``launch``, after one that clears amax if the product finds it."""
    if not p.amax:
        return launch
    clear = plan_clear_amax(p.target)

    def clear_and_launch(stream: int, *addresses: int) -> None:
        *_, amax, _scratch = addresses
        clear(stream, amax)
        launch(stream, *addresses)

    return clear_and_launch


def _ready(p: ScaledMm, multiply: Launch) -> Matmul:
    """Return the launch of a kernel that takes no scratch."""
    return ready(clearing_amax(p, lambda stream, *addresses: multiply(stream, *addresses[:-1])))


_ANY: Final = (ON_A_GPU, *ANY_OPERANDS, COUNTABLE)
GENERIC_DECODE: Final = Kernel(
    "generic_decode", (*_ANY, grid_fits(decode_grid)), plan_decode, (few_rows(MOST_ROWS, "estimated"),)
)
"""The row of `scaled_mm` that multiplies few rows of anything on any GPU."""
GENERIC_MMA: Final = Kernel("generic_mma", (*_ANY, grid_fits(mma_grid)), plan_mma)
"""The row of `scaled_mm` that multiplies anything on any GPU."""
HOST: Final = Kernel("host", (ON_THE_HOST, *ANY_OPERANDS), lambda p: ready(host.plan_scaled_mm(p)))
"""The row of `scaled_mm` for NumPy arrays."""
