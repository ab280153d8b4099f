"""The product that runs anywhere, and the end of a product whose accumulator came from elsewhere."""

from typing import Final

from fp8core.kernels.words import FORMAT, RESULT, TYPE, ceil_div
from fp8core.problem import ScaledMm
from fp8core.runtime import jit

MM_THREADS: Final = 256
RESCALE_COLUMNS: Final = 4
"""Columns of a thread; RESCALE_COLUMNS in the source."""
FEW_ROWS: Final = 16
BLOCKS_A_MULTIPROCESSOR: Final = 16


class Clearer:
    """Sets the amax of a problem to zero before a kernel takes maxima into it; nothing when none is asked for."""

    def __init__(self, problem: ScaledMm) -> None:
        self._launcher: jit.Launcher | None = None
        if problem.amax:
            self._launcher = jit.prepare(problem.target, "clear_amax", "clear_amax", {}, "P", block=1)

    def __call__(self, stream: int, amax: int) -> None:
        """Launch on ``stream``; ``amax`` is its address."""
        if self._launcher is not None:
            self._launcher(stream, (1, 1, 1), amax)


class GenericMm:
    """``round(scale_a * (scale_b * acc) + bias)`` by decoding to fp32 and ordinary FMA: any shape, alignment, device.

    Blocked scales join every 128 of k: ``acc += scale_a * (scale_b * partial)``. For FP8 results codes are
    ``encode(clamp(value * RN(1 / out_scale)))``; ``amax`` becomes the largest ``|value|``, NaN aside. ``k = 0`` gives
    zeros plus the bias.
    """

    scratch_bytes = 0

    def __init__(self, problem: ScaledMm) -> None:
        down, wide, depth = (1, 2, 64) if problem.m <= FEW_ROWS else (4, 4, 32)
        words = all(number % 4 == 0 for number in (problem.alignment, problem.lda, problem.ldb, problem.k))
        self._shape = (problem.m, problem.n, problem.k)
        self._strides = (problem.lda, problem.ldb, problem.ldo)
        self._scale_strides = (problem.scale_a_strides, problem.scale_b_strides)
        self._row_tiles = ceil_div(problem.m, 16 * down)
        self._grid = (self._row_tiles * ceil_div(problem.n, 16 * wide), 1, 1)
        self._clear = Clearer(problem)
        self._launcher = jit.prepare(
            problem.target,
            "generic_mm",
            "generic_mm",
            {
                "FP8_A": FORMAT[problem.a],
                "FP8_B": FORMAT[problem.b],
                "FP8_OUT": RESULT[problem.out],
                "FP8_BIAS": TYPE[problem.bias] if problem.bias else -1,
                "FP8_BLOCKED": int(problem.scale_a == "group" or problem.scale_b in ("group", "block")),
                "FP8_B_BLOCK": int(problem.scale_b == "block"),
                "FP8_AMAX": int(problem.amax),
                "FP8_DOWN": down,
                "FP8_WIDE": wide,
                "FP8_DEPTH": depth,
                "FP8_VECTOR": 4 if words else 1,
            },
            "PqPqPqqPqqPPqPPiiii",
            block=MM_THREADS,
            programmatic=True,
        )

    def __call__(
        self,
        stream: int,
        a: int,
        b: int,
        scale_a: int,
        scale_b: int,
        bias: int,
        out: int,
        out_scale: int,
        amax: int,
        _scratch: int,
    ) -> None:
        """Launch; `SCALED_MM`'s parameters."""
        lda, ldb, ldo = self._strides
        across, along = self._scale_strides
        self._clear(stream, amax)
        operands = (a, lda, b, ldb, scale_a, *across, scale_b, *along, bias, out, ldo, out_scale, amax)
        self._launcher(stream, self._grid, *operands, *self._shape, self._row_tiles)


class Rescale:
    """``round(scale_a * (scale_b * acc) + bias)`` of a finished fp32 accumulator ``[m, n]``, contiguous.

    FP8 results and ``amax`` are as `GenericMm` has them. The scales are per tensor, token or channel: their strides
    along k are not looked at.
    """

    scratch_bytes = 0

    def __init__(self, problem: ScaledMm) -> None:
        self._m, self._n, self._ldo = problem.m, problem.n, problem.ldo
        self._scale_strides = (problem.scale_a_strides[0], problem.scale_b_strides[0])
        self._column_tiles = ceil_div(problem.n, MM_THREADS * RESCALE_COLUMNS)
        at_once = max(1, problem.target.multiprocessors * BLOCKS_A_MULTIPROCESSOR // self._column_tiles)
        self._grid = (self._column_tiles * min(problem.m, at_once), 1, 1)
        self._clear = Clearer(problem)
        self._launcher = jit.prepare(
            problem.target,
            "rescale",
            "rescale",
            {
                "FP8_OUT": RESULT[problem.out],
                "FP8_BIAS": TYPE[problem.bias] if problem.bias else -1,
                "FP8_AMAX": int(problem.amax),
                "FP8_THREADS": MM_THREADS,
            },
            "PPqPqPPqPPiii",
            block=MM_THREADS,
            programmatic=True,
        )

    def __call__(
        self, stream: int, acc: int, scale_a: int, scale_b: int, bias: int, out: int, out_scale: int, amax: int
    ) -> None:
        """Launch on ``stream``; ``acc`` is the accumulator's address, the rest as in `SCALED_MM`."""
        across, along = self._scale_strides
        self._clear(stream, amax)
        operands = (acc, scale_a, across, scale_b, along, bias, out, self._ldo, out_scale, amax)
        self._launcher(stream, self._grid, *operands, self._m, self._n, self._column_tiles)


def plan_generic(problem: ScaledMm) -> GenericMm:
    """Return the launch of the row "dequantize", which multiplies anything."""
    return GenericMm(problem)


def plan_rescale(problem: ScaledMm) -> Rescale:
    """Return ``launch(stream, acc, scale_a, scale_b, bias, out, out_scale, amax)``."""
    return Rescale(problem)
