"""Block-scaled products of cuBLASLt with m not a multiple of 4: sm90_decode multiplies the last one to three rows."""

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import scratch_part
from fp8core.kernels.gemm.args import Matmul, ready
from fp8core.kernels.gemm.blaslt import matmul
from fp8core.kernels.gemm.blaslt.descriptors import Product
from fp8core.kernels.gemm.blaslt.mapping import FOUR, modes, moved_bias, product, relayouts
from fp8core.kernels.gemm.blaslt.moves import NOTHING, plan_moves, relayout_of
from fp8core.kernels.gemm.sm90.decode import decode
from fp8core.problem import ScaledMm


def first_rows(p: ScaledMm) -> Product:
    """Return the product of as many rows as cuBLASLt takes: a multiple of four."""
    return product(p, p.m - p.m % FOUR)


def last_rows(p: ScaledMm) -> ScaledMm:
    """Return the problem of the other rows; its vectors have any alignment, or have been copied."""
    prefetch = p.prefetch_weight and not moved_bias(p)
    return p._replace(m=p.m % FOUR, vectors_alignment=4, scale_a_alignment=4, prefetch_weight=prefetch)


def plan_split_m(p: ScaledMm) -> Matmul:
    """Return cuBLASLt's product of a multiple of four rows, and that of the one to three other rows by sm90_decode."""
    most = first_rows(p)
    multiply, finish, head = matmul.plan(most), decode(last_rows(p)), most.m
    first = relayout_of(modes(p)[1], p.scale_a_strides, head, p.k)
    second = relayouts(p)[1]
    halves = moved_bias(p)
    move = plan_moves(p.target, (first, second), halves)
    at_scale_a = scratch_part(multiply.scratch_bytes)
    at_scale_b = at_scale_a + scratch_part(first.nbytes)
    at_bias = at_scale_b + scratch_part(second.nbytes)
    move_b = second is not NOTHING
    skip_a, skip_out, skip_scale = head * p.lda, head * p.ldo * ITEMSIZE[p.out], head * p.scale_a_strides[0] * 4

    def launch(stream: int, *addresses: int) -> None:
        a, b, scale_a, scale_b, bias, out, out_scale, amax, scratch = addresses
        copy_scale_a, copy_scale_b, copy_bias = scratch + at_scale_a, scratch + at_scale_b, scratch + at_bias
        move(stream, (scale_a, scale_b), (copy_scale_a, copy_scale_b), (bias, copy_bias), (0, 0))
        given_b, given_bias = copy_scale_b if move_b else scale_b, copy_bias if halves else bias
        multiply(stream, a, b, copy_scale_a, given_b, given_bias, out, out_scale, amax, scratch)
        finish(stream, a + skip_a, b, scale_a + skip_scale, scale_b, given_bias, out + skip_out, 0, 0, 0)

    return ready(launch, scratch_bytes=at_bias + scratch_part(2 * halves), prefetches_weight=True)
