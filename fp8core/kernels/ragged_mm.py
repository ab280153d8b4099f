"""Block-scaled products of cuBLASLt for numbers of rows that it refuses: those that 4 does not divide."""

from typing import Final

from fp8core import blaslt
from fp8core.blaslt import Launch, Product, with_scratch
from fp8core.kernels.arrange import NOTHING, arrangement, plan_arrange
from fp8core.kernels.hopper import plan_decode
from fp8core.kernels.library_mm import FOUR, arrangements, modes, moved_bias, padded, product
from fp8core.kernels.words import ceil_div
from fp8core.problem import ITEMSIZE, ScaledMm

MOST_PADDED: Final = 256
"""Up to here, two of the library's tiles of tokens, copies cost less than reading the weight twice (docs/tuning.md)."""


def padded_product(p: ScaledMm) -> Product:
    """Return the product of ``p`` with rows up to a multiple of four, between dense copies of a and of the result."""
    return product(p, ceil_div(p.m, FOUR) * FOUR)._replace(lda=p.k, ldo=p.n)


def first_rows(p: ScaledMm) -> Product:
    """Return the product of as many rows as cuBLASLt takes."""
    return product(p, p.m - p.m % FOUR)


def last_rows(p: ScaledMm) -> ScaledMm:
    """Return the problem of the rows that cuBLASLt leaves; its vectors start anywhere, or have been moved."""
    early = p.prefetch_weight and not moved_bias(p)
    return p._replace(m=p.m % FOUR, vectors_alignment=4, prefetch_weight=early)


def plan_padded(p: ScaledMm) -> Launch:
    """Return one product of cuBLASLt between two copies; the rows that are added hold what the scratch held.

    A row of the result depends on its own row of a alone, so that nothing of them is seen.
    """
    dense = padded_product(p)
    multiply, rows = blaslt.plan(dense), dense.m
    scales = arrangement(modes(p)[1], p.scale_a_strides, p.m, p.k)._replace(ld=rows)
    second = arrangements(p)[1]
    out_bytes = p.n * ITEMSIZE[p.out]
    arrange = plan_arrange(p.target, (scales, second, NOTHING), p.m * p.k // 2)
    give = plan_arrange(p.target, (NOTHING, NOTHING, NOTHING), p.m * out_bytes // 2)
    at_scale_a = padded(multiply.scratch_bytes)
    at_scale_b = at_scale_a + padded(scales.nbytes)
    at_a = at_scale_b + padded(second.nbytes)
    at_out = at_a + padded(rows * p.k)
    move_b = second is not NOTHING

    def launch(
        stream: int,
        a: int,
        b: int,
        scale_a: int,
        scale_b: int,
        bias: int,
        out: int,
        out_scale: int,
        amax: int,
        scratch: int,
    ) -> None:
        copy_a, copy_out = scratch + at_a, scratch + at_out
        copy_scale_a, copy_scale_b = scratch + at_scale_a, scratch + at_scale_b
        arrange(stream, (scale_a, scale_b, 0), (copy_scale_a, copy_scale_b, 0), (a, copy_a), (0, 0))
        given_b = copy_scale_b if move_b else scale_b
        multiply(stream, copy_a, b, copy_scale_a, given_b, bias, copy_out, out_scale, amax, scratch)
        give(stream, (0, 0, 0), (0, 0, 0), (copy_out, out), (0, 0))

    return with_scratch(launch, at_out + padded(rows * out_bytes))


def plan_finished(p: ScaledMm) -> Launch:
    """Return cuBLASLt's product of a multiple of four rows, and the decode kernel's of the one to three that follow."""
    most = first_rows(p)
    multiply, finish, head = blaslt.plan(most), plan_decode(last_rows(p)), most.m
    first = arrangement(modes(p)[1], p.scale_a_strides, head, p.k)
    second = arrangements(p)[1]
    halves = moved_bias(p)
    arrange = plan_arrange(p.target, (first, second, NOTHING), halves)
    at_scale_a = padded(multiply.scratch_bytes)
    at_scale_b = at_scale_a + padded(first.nbytes)
    at_bias = at_scale_b + padded(second.nbytes)
    move_b = second is not NOTHING
    skip_a, skip_out, skip_scale = head * p.lda, head * p.ldo * ITEMSIZE[p.out], head * p.scale_a_strides[0] * 4

    def launch(
        stream: int,
        a: int,
        b: int,
        scale_a: int,
        scale_b: int,
        bias: int,
        out: int,
        out_scale: int,
        amax: int,
        scratch: int,
    ) -> None:
        copy_scale_a, copy_scale_b, copy_bias = scratch + at_scale_a, scratch + at_scale_b, scratch + at_bias
        arrange(stream, (scale_a, scale_b, 0), (copy_scale_a, copy_scale_b, 0), (bias, copy_bias), (0, 0))
        given_b, given_bias = copy_scale_b if move_b else scale_b, copy_bias if halves else bias
        multiply(stream, a, b, copy_scale_a, given_b, given_bias, out, out_scale, amax, scratch)
        finish(stream, a + skip_a, b, scale_a + skip_scale, scale_b, given_bias, out + skip_out, 0, 0, 0)

    return with_scratch(launch, at_bias + padded(2 * halves))
