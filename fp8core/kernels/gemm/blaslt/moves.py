"""One launch that copies scales, bias and codes into the layouts that the BLAS libraries take."""

from collections.abc import Callable
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div, round_up
from fp8core.kernels.gemm.blaslt.dialects import ScaleMode
from fp8core.problem import BLOCK
from fp8core.runtime import jit
from fp8core.runtime.args import Int32, Int64, Pointer
from fp8core.target import Target

THREADS: Final = 256
ELEMENTS_PER_THREAD: Final = 4
BLOCKS_PER_MULTIPROCESSOR: Final = 8


class RelayoutArgs(NamedTuple):
    """The arguments of relayout: two matrices of scales, 16-bit numbers to copy, and a number to invert."""

    in0: Pointer
    out0: Pointer
    row0: Int64
    col0: Int64
    rows0: Int32
    cols0: Int32
    ld0: Int32
    in1: Pointer
    out1: Pointer
    row1: Int64
    col1: Int64
    rows1: Int32
    cols1: Int32
    ld1: Int32
    halves: Pointer
    copy: Pointer
    halves_count: Int32
    number: Pointer
    reciprocal: Pointer


Pair = tuple[int, int]
Move = Callable[[int, Pair, Pair, Pair, Pair], None]


class Relayout(NamedTuple):
    """A strided matrix of fp32 scales, ``[rows, cols]``, to copy into dense rows of ``ld`` floats."""

    row_stride: int
    col_stride: int
    rows: int
    cols: int
    ld: int

    @property
    def done(self) -> bool:
        """Whether the matrix already has that layout."""
        return (
            (self.rows <= 1 or self.row_stride == self.ld)
            and (self.cols <= 1 or self.col_stride == 1)
            and self.cols == self.ld
        )

    @property
    def nbytes(self) -> int:
        """The bytes of the result."""
        return 4 * self.rows * self.ld


NOTHING: Final = Relayout(0, 0, 0, 0, 0)
"""A matrix of the kernel that is not used."""


def relayout_of(mode: ScaleMode, strides: tuple[int, int], rows: int, k: int) -> Relayout:
    """Return the relayout of the scales of ``rows`` rows of k elements.

    Args:
        mode: the mode in which the library takes them.
        strides: of the scales as a matrix over (rows or blocks of rows, blocks of k), 0 where broadcast.
        rows: m of the tokens, n of the weight.
        k: the shared axis.
    """
    blocks = ceil_div(k, BLOCK)
    match mode:
        case "SCALAR":
            return Relayout(0, 0, 1, 1, 1)
        case "OUTER_VEC":
            return Relayout(0, strides[0], 1, rows, rows)
        case "VEC128":  # tokens, or channels, are contiguous
            return Relayout(strides[1], strides[0], blocks, rows, rows)
        case "BLK128x128":  # blocks of k are contiguous, in rows of a multiple of four
            return Relayout(strides[0], strides[1], ceil_div(rows, BLOCK), blocks, round_up(blocks, 4))


def plan_moves(target: Target, places: tuple[Relayout, Relayout], halves: int = 0) -> Move:
    """Return ``move(stream, sources, results, bias, out_scale)``, one launch.

    ``sources`` and ``results`` are the addresses of each matrix (any address for `NOTHING`). ``bias`` is the source and
    the destination of ``halves`` 16-bit numbers, or twice as many bytes; ``out_scale`` is the address of an fp32 number
    (0: none) and that of its reciprocal.
    """
    launcher = jit.prepare(target, "gemm/relayout", "relayout", {}, RelayoutArgs, block=THREADS)
    most = max(halves, *(place.rows * place.ld for place in places))
    blocks = min(ceil_div(most, THREADS * ELEMENTS_PER_THREAD), BLOCKS_PER_MULTIPROCESSOR * target.multiprocessors)
    first, second = places
    args = RelayoutArgs(0, 0, *first, 0, 0, *second, 0, 0, halves, 0, 0)
    launch = launcher.bind_args((max(blocks, 1), 1, 1), args)

    def move(stream: int, sources: Pair, results: Pair, bias: Pair, out_scale: Pair) -> None:
        in0, in1 = sources
        out0, out1 = results
        launch(stream, in0, out0, in1, out1, *bias, *out_scale)

    return move
