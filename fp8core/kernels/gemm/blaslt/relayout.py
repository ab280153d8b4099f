"""A product of a library after one launch that gives scales, bias and 1 / out_scale the form that it takes."""

from fp8core.kernels.encodings import scratch_part
from fp8core.kernels.gemm.args import Matmul, ready
from fp8core.kernels.gemm.blaslt import matmul
from fp8core.kernels.gemm.blaslt.mapping import moved_bias, product, relayouts
from fp8core.kernels.gemm.blaslt.moves import NOTHING, plan_moves
from fp8core.problem import ScaledMm


def plan_relayout(p: ScaledMm, number: int = 0) -> Matmul:
    """Return the launches of the rows "cublaslt_relayout" and "hipblaslt_relayout"."""
    multiply = matmul.plan(product(p), number)
    first, second = relayouts(p)
    halves = moved_bias(p)
    move = plan_moves(p.target, (first, second), halves)
    at_a = scratch_part(multiply.scratch_bytes)
    at_b = at_a + scratch_part(first.nbytes)
    at_bias = at_b + scratch_part(second.nbytes)
    at_out = at_bias + scratch_part(2 * halves)
    move_a, move_b, inverted = first is not NOTHING, second is not NOTHING, p.out_scale

    def launch(stream: int, *addresses: int) -> None:
        a, b, scale_a, scale_b, bias, out, out_scale, amax, scratch = addresses
        result_a, result_b, copy, reciprocal = scratch + at_a, scratch + at_b, scratch + at_bias, scratch + at_out
        move(stream, (scale_a, scale_b), (result_a, result_b), (bias, copy), (out_scale, reciprocal))
        given_a, given_b = result_a if move_a else scale_a, result_b if move_b else scale_b
        given_bias, given_scale = copy if halves else bias, reciprocal if inverted else 0
        multiply(stream, a, b, given_a, given_b, given_bias, out, given_scale, amax, scratch)

    return ready(launch, scratch_bytes=at_out + (scratch_part(4) if inverted else 0))
