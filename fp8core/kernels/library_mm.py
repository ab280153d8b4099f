"""A scaled product as one or two products of a BLASLt library, with what has to be done before and after."""

from typing import Final

from fp8core import blaslt
from fp8core.blaslt import Launch, Product, with_scratch
from fp8core.blaslt.names import ScaleMode
from fp8core.blaslt.product import MODES, Scales
from fp8core.kernels.arrange import NOTHING, Arrangement, arrangement, plan_arrange
from fp8core.kernels.generic_mm import plan_rescale
from fp8core.problem import FORMATS, ScaledMm

SCALES: Final[dict[tuple[str, str], Scales]] = {
    ("tensor", "tensor"): "tensor",
    ("row", "row"): "row",
    ("tensor", "row"): "row",
    ("row", "tensor"): "row",
    ("group", "block"): "group x block",
    ("group", "group"): "group x group",
}
"""How a library takes granularities of scale_a and scale_b; it has no mode for another pair."""

VECTOR_ALIGNMENT: Final = 16
"""cuBLASLt 13.1 answers a product with status 15 when a scale's address is not divisible by this (H200)."""

FOUR: Final = 4
"""The libraries' VEC128 scales want m divisible by this; kernels/ragged_mm.py has products of other numbers of rows."""


def product(p: ScaledMm, m: int | None = None) -> Product:
    """Return ``p``, or as many of its rows as ``m``, as the library's own product with all that it does by itself."""
    scales = SCALES[p.scale_a, p.scale_b]
    return Product(
        target=p.target,
        m=p.m if m is None else m,
        n=p.n,
        k=p.k,
        a=p.a,
        b=p.b,
        out=p.out,
        scales=scales,
        bias=p.bias,
        out_scale=p.out_scale,
        amax=p.amax,
        fast_accum=p.use_fast_accum and not scales.startswith("group"),  # refused there with status 15
        lda=p.lda,
        ldb=p.ldb,
        ldo=p.ldo,
        alignment=p.alignment,
    )


def accumulation(p: ScaledMm) -> Product:
    """Return the product of ``p`` without scales and bias, into dense rows of fp32."""
    return product(p._replace(scale_a="tensor", scale_b="tensor"))._replace(
        scales="unit", out="float32", ldo=p.n, bias="", out_scale=False, amax=False
    )


def arrangements(p: ScaledMm) -> tuple[Arrangement, Arrangement]:
    """Return what scale_a and scale_b need; `NOTHING` of one that can be given as it lies."""
    weight, tokens = modes(p)
    first = arrangement(tokens, p.scale_a_strides, p.m, p.k)
    second = arrangement(weight, p.scale_b_strides, p.n, p.k)
    far = p.vectors_alignment < VECTOR_ALIGNMENT
    return first if far or not first.done else NOTHING, second if far or not second.done else NOTHING


def moved_bias(p: ScaledMm) -> int:
    """Return how many numbers of the bias have to be copied to an aligned address."""
    return p.n if p.bias and p.vectors_alignment < VECTOR_ALIGNMENT else 0


def modes(p: ScaledMm) -> tuple[ScaleMode, ScaleMode]:
    """Return the library's modes of the weight's scale and of the tokens'."""
    return MODES[SCALES[p.scale_a, p.scale_b]]


def padded(nbytes: int) -> int:
    """Return ``nbytes`` as a part of a scratch takes it, so that the next one is aligned."""
    return -(-nbytes // 256) * 256


def plan_direct(p: ScaledMm, choice: int = 0) -> Launch:
    """Return the library's product by its offer number ``choice``: what it is given is what it takes."""
    return blaslt.plan(product(p), choice)


def plan_arranged(p: ScaledMm, choice: int = 0) -> Launch:
    """Return the library's product after one launch that brings scales, bias and 1 / out_scale into its form."""
    multiply = blaslt.plan(product(p), choice)
    first, second = arrangements(p)
    halves = moved_bias(p)
    arrange = plan_arrange(p.target, (first, second, NOTHING), halves)
    at_a = padded(multiply.scratch_bytes)
    at_b = at_a + padded(first.nbytes)
    at_bias = at_b + padded(second.nbytes)
    at_out = at_bias + padded(2 * halves)
    move_a, move_b, inverted = first is not NOTHING, second is not NOTHING, p.out_scale

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
        result_a, result_b, copy, reciprocal = scratch + at_a, scratch + at_b, scratch + at_bias, scratch + at_out
        arrange(stream, (scale_a, scale_b, 0), (result_a, result_b, 0), (bias, copy), (out_scale, reciprocal))
        multiply(
            stream,
            a,
            b,
            result_a if move_a else scale_a,
            result_b if move_b else scale_b,
            copy if halves else bias,
            out,
            reciprocal if inverted else 0,
            amax,
            scratch,
        )

    return with_scratch(launch, at_out + (padded(4) if inverted else 0))


def plan_rescaled(p: ScaledMm, choice: int = 0) -> Launch:
    """Return the library's product without scales into fp32 scratch, and one launch that does the rest."""
    multiply = blaslt.plan(accumulation(p), choice)
    rescale = plan_rescale(p)
    at_product = padded(multiply.scratch_bytes)

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
        multiply(stream, a, b, 0, 0, 0, scratch + at_product, 0, 0, scratch)
        rescale(stream, scratch + at_product, scale_a, scale_b, bias, out, out_scale, amax)

    return with_scratch(launch, at_product + padded(4 * p.m * p.n))


NATIVE_BIAS: Final[dict[str, tuple[str, ...]]] = {
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
    "float32": ("bfloat16",),
    **dict.fromkeys(FORMATS, ("bfloat16", "float16")),
}
"""The biases that the libraries add by themselves, by the dtype of the result."""
