"""Block-scaled products of cuBLASLt for numbers of rows that are not multiples of 4: by padded copies, up to a size."""

from typing import Final

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import round_up, scratch_part
from fp8core.kernels.gemm.args import Matmul, ready
from fp8core.kernels.gemm.blaslt import matmul
from fp8core.kernels.gemm.blaslt.descriptors import Product
from fp8core.kernels.gemm.blaslt.mapping import FOUR, modes, product, relayouts
from fp8core.kernels.gemm.blaslt.moves import NOTHING, plan_moves, relayout_of
from fp8core.problem import ScaledMm

MOST_PADDED: Final = 256
"""Rows up to which copies cost less than a second read of the weight: two of the library's tiles of tokens
(2026-11-many-rows)."""

MOST_COPIED: Final = 1 << 30
"""Most numbers of 16 bits, as which a and the result are copied: the kernel counts them in 32 bits."""


def copied_halves(p: ScaledMm) -> int:
    """Return how many numbers of 16 bits the larger copy has, that of a or that of the result."""
    return p.m * max(p.k, p.n * ITEMSIZE[p.out]) // 2


def padded_product(p: ScaledMm) -> Product:
    """Return the product of ``p``, whose rows have no gaps, with m rounded up to a multiple of four."""
    return product(p, round_up(p.m, FOUR))


def plan_pad_m(p: ScaledMm) -> Matmul:
    """Return one product of cuBLASLt between two copies; the padding rows contain whatever the scratch contains.

    A row of the result depends only on its own row of a, so the padding affects no result.
    """
    dense = padded_product(p)
    multiply, rows = matmul.plan(dense), dense.m
    scales = relayout_of(modes(p)[1], p.scale_a_strides, p.m, p.k)._replace(ld=rows)
    second = relayouts(p)[1]
    out_bytes = p.n * ITEMSIZE[p.out]
    move_in = plan_moves(p.target, (scales, second), p.m * p.k // 2)
    move_out = plan_moves(p.target, (NOTHING, NOTHING), p.m * out_bytes // 2)
    at_scale_a = scratch_part(multiply.scratch_bytes)
    at_scale_b = at_scale_a + scratch_part(scales.nbytes)
    at_a = at_scale_b + scratch_part(second.nbytes)
    at_out = at_a + scratch_part(rows * p.k)
    move_b = second is not NOTHING

    def launch(stream: int, *addresses: int) -> None:
        a, b, scale_a, scale_b, bias, out, out_scale, amax, scratch = addresses
        copy_a, copy_out = scratch + at_a, scratch + at_out
        copy_scale_a, copy_scale_b = scratch + at_scale_a, scratch + at_scale_b
        move_in(stream, (scale_a, scale_b), (copy_scale_a, copy_scale_b), (a, copy_a), (0, 0))
        given_b = copy_scale_b if move_b else scale_b
        multiply(stream, copy_a, b, copy_scale_a, given_b, bias, copy_out, out_scale, amax, scratch)
        move_out(stream, (0, 0), (0, 0), (copy_out, out), (0, 0))

    return ready(launch, scratch_bytes=at_out + scratch_part(rows * out_bytes))
