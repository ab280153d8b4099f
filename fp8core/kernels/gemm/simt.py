"""The fallback product by ordinary FMA, and an amax that is written before maxima are taken into it."""

from typing import Final, NamedTuple

from fp8core import host
from fp8core.kernels.encodings import FORMAT, RESULT, TYPE, ceil_div
from fp8core.kernels.gemm.args import Matmul, MatmulArgs, ready
from fp8core.kernels.gemm.requirements import FLOAT32_SCALES, NOT_BOTH_E5M2, grid_fits
from fp8core.kernels.requirements import platform
from fp8core.problem import ScaledMm, Target
from fp8core.runtime import jit
from fp8core.runtime.args import Pointer
from fp8core.table import Kernel, Launch

THREADS: Final = 256
SMALL_TILE_ROWS: Final = 16
"""Up to so many rows a block has a tile of 16 x 32 results, else of 64 x 64."""


class ClearArgs(NamedTuple):
    """Of clear_amax."""

    amax: Pointer


class SimtArgs(NamedTuple):
    """Of simt."""

    matmul: MatmulArgs
    out_scale: Pointer
    amax: Pointer


def plan_clear_amax(target: Target) -> Launch:
    """Return ``launch(stream, amax)``, which writes 0.0: the amax of a product without rows or columns."""
    if target.platform == "host":
        return host.plan_clear_amax()
    launcher = jit.prepare(target, "gemm/clear_amax", "clear_amax", {}, ClearArgs, block=1)
    return launcher.bind_args((1, 1, 1), ClearArgs(0))


def tile(p: ScaledMm) -> tuple[int, int, int]:
    """Return the rows and the channels of a thread, and what a block has of k at a time."""
    return (1, 2, 64) if p.m <= SMALL_TILE_ROWS else (4, 4, 32)


def grid(p: ScaledMm) -> tuple[int, int]:
    """Return the blocks of a launch and their threads."""
    down, wide, _ = tile(p)
    return ceil_div(p.m, 16 * down) * ceil_div(p.n, 16 * wide), THREADS


def plan_simt(p: ScaledMm) -> Matmul:
    """Return ``round(scale_a * (scale_b * acc) + bias)`` by decoding to fp32: any shape, any alignment, any device.

    Blocked scales join every 128 of k: ``acc += scale_a * (scale_b * partial)``. For FP8 results codes are
    ``encode(clamp(value * RN(1 / out_scale)))``; ``amax`` becomes the largest ``|value|``, NaN aside. ``k = 0`` gives
    zeros plus the bias.
    """
    thread_rows, thread_cols, depth = tile(p)
    words = all(number % 4 == 0 for number in (p.alignment, p.lda, p.ldb, p.k))
    row_tiles = ceil_div(p.m, 16 * thread_rows)
    launcher = jit.prepare(
        p.target,
        "gemm/simt",
        "simt",
        {
            "FP8_A": FORMAT[p.a],
            "FP8_B": FORMAT[p.b],
            "FP8_OUT": RESULT[p.out],
            "FP8_BIAS": TYPE[p.bias] if p.bias else -1,
            "FP8_BLOCKED": int(p.scale_a == "group" or p.scale_b in ("group", "block")),
            "FP8_B_BLOCK": int(p.scale_b == "block"),
            "FP8_AMAX": int(p.amax),
            "FP8_THREAD_ROWS": thread_rows,
            "FP8_THREAD_COLS": thread_cols,
            "FP8_DEPTH": depth,
            "FP8_VECTOR": 4 if words else 1,
        },
        SimtArgs,
        block=THREADS,
        programmatic=True,
    )
    args = SimtArgs(MatmulArgs.of(p, row_tiles), 0, 0)
    multiply = launcher.bind_args((grid(p)[0], 1, 1), args)
    if not p.amax:
        return ready(lambda stream, *addresses: multiply(stream, *addresses[:-1]))
    clear = plan_clear_amax(p.target)

    def launch(stream: int, *addresses: int) -> None:
        *operands, amax, _scratch = addresses
        clear(stream, amax)
        multiply(stream, *operands, amax)

    return ready(launch)


SIMT: Final = Kernel("simt", (platform("cuda", "hip"), NOT_BOTH_E5M2, FLOAT32_SCALES, grid_fits(grid)), plan_simt)
"""The row of `scaled_mm` that multiplies anything on any GPU."""
HOST: Final = Kernel("host", (platform("host"), NOT_BOTH_E5M2, FLOAT32_SCALES), lambda p: ready(host.plan_scaled_mm(p)))
"""The row of `scaled_mm` for NumPy arrays."""
