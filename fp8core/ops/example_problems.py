"""Problems of aligned arrays, for `capabilities` and the support matrix: made without arrays, for any target."""

from fp8core.dtypes import FORMATS
from fp8core.problem import BLOCK, Granularity, GroupedMm, GroupShape, Quantize, ScaledMm
from fp8core.target import Target, native_e4m3


def example_product(
    target: Target,
    scale_a: Granularity = "tensor",
    scale_b: Granularity = "tensor",
    *,
    m: int = 256,
    n: int = 4096,
    k: int = 4096,
    a: str = "",
    b: str = "",
    out: str = "bfloat16",
    bias: str = "",
) -> ScaledMm:
    """Return the problem of a product of aligned matrices; ``a`` and ``b`` are by default the target's E4M3."""
    native, k_blocks = native_e4m3(target), -(-k // BLOCK)
    bits = 16 | k | 2 * n
    return ScaledMm(
        target=target,
        m=m,
        n=n,
        k=k,
        a=a or native,
        b=b or native,
        out=out,
        scale_a=scale_a,
        scale_b=scale_b,
        scale_a_strides={"tensor": (0, 0), "row": (1, 0), "group": (1, m)}[scale_a],
        scale_b_strides={"tensor": (0, 0), "row": (1, 0), "group": (k_blocks, 1), "block": (k_blocks, 1)}[scale_b],
        bias=bias,
        out_scale=out in FORMATS,
        amax=False,
        use_fast_accum=True,
        batch_invariant=False,
        lda=k,
        ldb=k,
        ldo=n,
        alignment=bits & -bits,
    )


def example_grouped(
    target: Target, scale_a: Granularity = "row", scale_b: Granularity = "row", *, groups: int = 8
) -> GroupedMm:
    """Return the problem of a grouped product of aligned matrices, 32 rows of each group."""
    one = example_product(target, scale_a, scale_b, m=32 * groups)
    scales = {
        "tensor": 1,
        "row": one.n,
        "group": one.n * -(-one.k // BLOCK),
        "block": -(-one.n // BLOCK) * -(-one.k // BLOCK),
    }
    return GroupedMm(groups, one, one.n * one.k, scales[scale_b], 0)


def example_quantize(target: Target, group_shape: GroupShape, *, static: bool = False) -> Quantize:
    """Return the problem of quantizing aligned bfloat16 rows."""
    return Quantize(
        target=target,
        x="bfloat16",
        data=native_e4m3(target),
        group_shape=group_shape,
        static=static,
        scale_format="float32",
        scale_layout="k",
        cols=4096,
        alignment=16,
    )
