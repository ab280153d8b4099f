"""Scales brought into the layouts that the BLAS libraries want, on the device, by one launch."""

from collections.abc import Callable
from typing import Final, NamedTuple

from fp8core.blaslt.names import ScaleMode
from fp8core.problem import Target
from fp8core.runtime import jit

THREADS: Final = 256
ELEMENTS_PER_THREAD: Final = 4
BLOCKS_PER_MULTIPROCESSOR: Final = 8

Arrange = Callable[[int, tuple[int, int, int], tuple[int, int, int], tuple[int, int], tuple[int, int]], None]


class Arrangement(NamedTuple):
    """A strided matrix of fp32 scales, ``[rows, cols]``, and the rows of ``ld`` floats that it is to become."""

    row_stride: int
    col_stride: int
    rows: int
    cols: int
    ld: int

    @property
    def done(self) -> bool:
        """Whether the matrix lies as it should already."""
        return (
            (self.rows <= 1 or self.row_stride == self.ld)
            and (self.cols <= 1 or self.col_stride == 1)
            and self.cols == self.ld
        )

    @property
    def nbytes(self) -> int:
        """The bytes of the result."""
        return 4 * self.rows * self.ld


NOTHING: Final = Arrangement(0, 0, 0, 0, 0)
"""A place of the kernel that is not used."""


def arrangement(mode: ScaleMode, strides: tuple[int, int], rows: int, k: int) -> Arrangement:
    """Return what a scale of ``rows`` rows of k elements needs.

    Args:
        mode: what the library is to take it as.
        strides: of the scale as a matrix over (rows or blocks of rows, blocks of k), 0 where it is broadcast.
        rows: m of the tokens, n of the weight.
        k: the shared axis.
    """
    blocks = -(-k // 128)
    match mode:
        case "SCALAR":
            return Arrangement(0, 0, 1, 1, 1)
        case "OUTER_VEC":
            return Arrangement(0, strides[0], 1, rows, rows)
        case "VEC128":  # the library wants the tokens, or the channels, next to each other
            return Arrangement(strides[1], strides[0], blocks, rows, rows)
        case "BLK128x128":  # it wants the blocks of k next to each other, in rows of a multiple of four
            return Arrangement(strides[0], strides[1], -(-rows // 128), blocks, -(-blocks // 4) * 4)


def plan_arrange(target: Target, places: tuple[Arrangement, Arrangement, Arrangement], halves: int = 0) -> Arrange:
    """Return ``arrange(stream, sources, results, bias, out_scale)``, one launch.

    ``sources`` and ``results`` hold the addresses of each place (any where it is `NOTHING`). ``bias`` says from where
    to where ``halves`` 16-bit numbers, or twice as many bytes, are copied, ``out_scale`` where an fp32 number stands
    (0: none) and where its reciprocal goes.
    """
    letters = "PPqqiii" * 3 + "PPiPP"
    launcher = jit.prepare(target, "arrange_scales", "arrange_scales", {}, letters, block=THREADS)
    most = max(halves, *(place.rows * place.ld for place in places))
    blocks = min(-(-most // (THREADS * ELEMENTS_PER_THREAD)), BLOCKS_PER_MULTIPROCESSOR * target.multiprocessors)
    grid = (max(blocks, 1), 1, 1)
    first, second, third = places

    def arrange(
        stream: int,
        sources: tuple[int, int, int],
        results: tuple[int, int, int],
        bias: tuple[int, int],
        out_scale: tuple[int, int],
    ) -> None:
        launcher(
            stream,
            grid,
            sources[0],
            results[0],
            *first,
            sources[1],
            results[1],
            *second,
            sources[2],
            results[2],
            *third,
            *bias,
            halves,
            *out_scale,
        )

    return arrange
