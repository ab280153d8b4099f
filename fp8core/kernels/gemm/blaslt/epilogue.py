"""A product of a library without scales, and one launch that applies scales and bias, rounds and finds the amax."""

from typing import Final, NamedTuple

from fp8core.kernels.encodings import RESULT, TYPE, ceil_div, scratch_part
from fp8core.kernels.gemm.args import Matmul, ending, ready
from fp8core.kernels.gemm.blaslt import matmul
from fp8core.kernels.gemm.blaslt.mapping import accumulation
from fp8core.kernels.gemm.generic import plan_clear_amax
from fp8core.problem import ScaledMm
from fp8core.runtime import jit
from fp8core.runtime.args import Float32, Int32, Int64, Pointer
from fp8core.table import Launch

THREADS: Final = 256
COLUMNS: Final = 4
"""Columns per thread; EPILOGUE_COLUMNS in the source."""
BLOCKS_A_MULTIPROCESSOR: Final = 16


class EpilogueArgs(NamedTuple):
    """The arguments of apply_epilogue."""

    acc: Pointer
    scale_a: Pointer
    scale_a_stride: Int64
    scale_b: Pointer
    scale_b_stride: Int64
    bias: Pointer
    out: Pointer
    out_stride: Int64
    out_scale: Pointer
    amax: Pointer
    m: Int32
    n: Int32
    column_tiles: Int32
    beta: Float32


def plan_end(p: ScaledMm) -> Launch:
    """Return ``launch(stream, acc, scale_a, scale_b, bias, out, out_scale, amax)``.

    It computes ``round(scale_a * (scale_b * acc) + bias)`` from a complete, contiguous fp32 accumulator ``[m, n]``. FP8
    results and amax are as in `plan_mma`. The scales are per tensor, token or channel; strides along k are ignored.
    """
    column_tiles = ceil_div(p.n, THREADS * COLUMNS)
    at_once = max(1, p.target.multiprocessors * BLOCKS_A_MULTIPROCESSOR // column_tiles)
    launcher = jit.prepare(
        p.target,
        "gemm/apply_epilogue",
        "apply_epilogue",
        {
            "FP8_OUT": RESULT[p.out],
            "FP8_BIAS": TYPE[p.bias] if p.bias else -1,
            "FP8_AMAX": int(p.amax),
            **ending(p),
            "FP8_THREADS": THREADS,
        },
        EpilogueArgs,
        block=THREADS,
        programmatic=True,
    )
    numbers = (0, 0, p.ldo, 0, 0, p.m, p.n, column_tiles, p.beta)
    args = EpilogueArgs(0, 0, p.scale_a_strides[0], 0, p.scale_b_strides[0], *numbers)
    finish = launcher.bind_args((column_tiles * min(p.m, at_once), 1, 1), args)
    if not p.amax:
        return finish
    clear = plan_clear_amax(p.target)

    def launch(
        stream: int, acc: int, scale_a: int, scale_b: int, bias: int, out: int, out_scale: int, amax: int
    ) -> None:
        clear(stream, amax)
        finish(stream, acc, scale_a, scale_b, bias, out, out_scale, amax)

    return launch


def plan_epilogue(p: ScaledMm, number: int = 0) -> Matmul:
    """Return the launches of the rows "cublaslt_epilogue" and "hipblaslt_epilogue"."""
    multiply = matmul.plan(accumulation(p), number)
    finish = plan_end(p)
    at_product = scratch_part(multiply.scratch_bytes)

    def launch(stream: int, *addresses: int) -> None:
        a, b, scale_a, scale_b, bias, out, out_scale, amax, scratch = addresses
        multiply(stream, a, b, 0, 0, 0, scratch + at_product, 0, 0, scratch)
        finish(stream, scratch + at_product, scale_a, scale_b, bias, out, out_scale, amax)

    return ready(launch, scratch_bytes=at_product + scratch_part(4 * p.m * p.n))
