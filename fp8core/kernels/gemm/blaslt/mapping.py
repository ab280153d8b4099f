"""A scaled product in the terms of a BLASLt library: its scale modes, and the operands that have to be copied."""

from typing import Final

from fp8core.dtypes import FORMATS
from fp8core.kernels.gemm.blaslt.descriptors import MODES, Product, Scales
from fp8core.kernels.gemm.blaslt.dialects import ScaleMode
from fp8core.kernels.gemm.blaslt.moves import NOTHING, Relayout, relayout_of
from fp8core.problem import ScaledMm

SCALES: Final[dict[tuple[str, str], Scales]] = {
    ("tensor", "tensor"): "tensor",
    ("row", "row"): "row",
    ("tensor", "row"): "row",
    ("row", "tensor"): "row",
    ("group", "block"): "group x block",
    ("group", "group"): "group x group",
}
"""The scales that a library takes, by the granularities of scale_a and scale_b; it has no mode for other pairs."""

VECTOR_ALIGNMENT: Final = 16
"""cuBLASLt 13.1 fails with status 15 if the address of a scale is not divisible by this (H200)."""

GELU: Final = "gelu_tanh"
"""The only activation of products that the libraries have, too."""
FOUR: Final = 4
"""The libraries' VEC128 scales need m divisible by this; pad_m.py and split_m.py handle other m."""


def product(p: ScaledMm, m: int | None = None) -> Product:
    """Return ``p``, or its first ``m`` rows, as a product of the library, with all that the library can do itself."""
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
        fast_accum=p.use_fast_accum and not scales.startswith("group"),  # else status 15
        lda=p.lda,
        ldb=p.ldb,
        ldo=p.ldo,
        alignment=p.alignment,
        gelu=p.activation == GELU,
        beta=p.beta,
    )


def accumulation(p: ScaledMm) -> Product:
    """Return the product of ``p`` in dense rows of fp32, without scales and without all that follows them."""
    return product(p._replace(scale_a="tensor", scale_b="tensor", activation="", beta=0.0))._replace(
        scales="unit", out="float32", ldo=p.n, bias="", out_scale=False, amax=False
    )


def relayouts(p: ScaledMm) -> tuple[Relayout, Relayout]:
    """Return the relayouts of scale_a and scale_b; `NOTHING` for one that the library takes as it is."""
    weight, tokens = modes(p)
    first = relayout_of(tokens, p.scale_a_strides, p.m, p.k)
    second = relayout_of(weight, p.scale_b_strides, p.n, p.k)
    far = p.vectors_alignment < VECTOR_ALIGNMENT
    return first if far or not first.done else NOTHING, second if far or not second.done else NOTHING


def moved_bias(p: ScaledMm) -> int:
    """Return how many numbers of a bias have to be copied to an aligned address."""
    return p.n if p.bias and p.vectors_alignment < VECTOR_ALIGNMENT else 0


def modes(p: ScaledMm) -> tuple[ScaleMode, ScaleMode]:
    """Return the library's modes for the scales of the weight and of the tokens."""
    return MODES[SCALES[p.scale_a, p.scale_b]]


NATIVE_BIAS: Final[dict[str, tuple[str, ...]]] = {
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
    "float32": ("bfloat16",),
    **dict.fromkeys(FORMATS, ("bfloat16", "float16")),
}
"""The dtypes of a bias that the libraries can add, by the dtype of the result."""
