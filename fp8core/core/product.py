"""The operands of a scaled product, and the checks that they fit together before anything is launched."""

from typing import Any, Final, NamedTuple, get_args

from fp8core.core import checks, scale_shapes, specs
from fp8core.core.scale_shapes import Reading
from fp8core.core.specs import TensorSpec
from fp8core.dtypes import FORMATS, HIGH_PRECISION, ITEMSIZE
from fp8core.errors import DTypeError, LayoutError, ScaleError, ShapeError
from fp8core.interop import dtype_name
from fp8core.problem import Activation, GroupShape, ScaledMm

RESULTS: Final = (*HIGH_PRECISION, *FORMATS)
"""The dtypes of results."""


class Product(NamedTuple):
    """The checked operands of a product."""

    a: TensorSpec
    b: TensorSpec
    """As it is stored, ``[n, k]``."""
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    scale_a: TensorSpec
    scale_b: TensorSpec
    reading_a: Reading
    reading_b: Reading
    bias: TensorSpec | None
    out: str
    out_scale: TensorSpec | None
    amax: TensorSpec | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (*self.a.shape[:-1], self.n)

    def problem(self, use_fast_accum: bool, batch_invariant: bool, out: TensorSpec | None) -> ScaledMm:
        """Return the problem with the result in ``out``, or in memory yet to be allocated."""
        ldo = specs.result_stride(out, self.a, self.shape, self.out)
        optional = (x.alignment for x in (self.bias, self.amax) if x is not None)
        codes_alignment = specs.alignment(self.a.alignment, self.b.alignment, self.lda, self.ldb)
        out_alignment = specs.alignment(specs.alignment_of(out), ldo * ITEMSIZE[self.out])
        return ScaledMm(
            target=self.a.target,
            m=self.m,
            n=self.n,
            k=self.k,
            a=self.a.dtype,
            b=self.b.dtype,
            out=self.out,
            scale_a=self.reading_a.granularity,
            scale_b=self.reading_b.granularity,
            scale_a_strides=self.reading_a.strides,
            scale_b_strides=self.reading_b.strides,
            bias=self.bias.dtype if self.bias is not None else "",
            out_scale=self.out_scale is not None,
            amax=self.amax is not None,
            use_fast_accum=use_fast_accum,
            batch_invariant=batch_invariant,
            lda=self.lda,
            ldb=self.ldb,
            ldo=ldo,
            alignment=min(codes_alignment, out_alignment),
            vectors_alignment=specs.alignment(self.scale_a.alignment, self.scale_b.alignment, *optional),
            scale_dtype=self.scale_a.dtype,
            codes_alignment=codes_alignment,
            out_alignment=out_alignment,
            scale_a_alignment=specs.alignment(self.scale_a.alignment),
        )


def product_of(
    a: TensorSpec,
    weight: TensorSpec,
    scale_a: TensorSpec,
    scale_b: TensorSpec,
    bias: TensorSpec | None,
    out_dtype: Any,
    out_scale: TensorSpec | None = None,
    amax: TensorSpec | None = None,
    *,
    stored: bool,
    group_a: GroupShape | None = None,
    group_b: GroupShape | None = None,
) -> Product:
    """Return the operands of a product after checking that they fit together.

    Args:
        a: FP8 ``[..., k]``.
        weight: FP8 ``[n, k]``.
        scale_a: the scale of a.
        scale_b: the scale of the weight, oriented like the weight if ``stored``, otherwise like its transpose.
        bias: ``[n]``.
        out_dtype: the result's dtype.
        out_scale: the scale of an FP8 result.
        amax: the array that receives the largest magnitude.
        stored: whether the caller gave the weight as it is stored.
        group_a: the group shape of a if it is known.
        group_b: the group shape of the stored weight if it is known.
    """
    out_name = dtype_name(out_dtype, "out_dtype", RESULTS)
    specs.check_fp8(a)
    specs.check_fp8(weight)
    m, k, lda = specs.matrix(a)
    if len(weight.shape) != 2:
        raise ShapeError(f"{weight.name} needs two axes {'[n, k]' if stored else '[k, n]'}, got shape {weight.shape}")
    n, weight_k = weight.shape
    if weight_k != k:
        axes, shape = ("[n, k]", (n, weight_k)) if stored else ("[k, n]", (weight_k, n))
        turned = f": the transpose of {weight.name} has k={k}" if n == k else ""
        raise ShapeError(
            f"{a.name} and {weight.name} must share k, got {a.name} [..., k] of shape {a.shape} "
            f"and {weight.name} {axes} of shape {shape}{turned}"
        )
    ldb = weight.strides[0] if n > 1 and k else k
    if n and ((k > 1 and weight.strides[1] != 1) or ldb < k):
        wanted = "contiguous rows [n, k]" if stored else "contiguous columns [k, n], as weight.T has them"
        raise LayoutError(f"{weight.name} needs {wanted}, got strides {weight.strides} (elements) over (n, k)")
    scale_shapes.check_scale_dtype(scale_a)
    scale_shapes.check_scale_dtype(scale_b)
    reading_a, reading_b = scale_shapes.of_product(
        scale_a, scale_b, a.shape[:-1], m, n, k, stored=stored, group_a=group_a, group_b=group_b
    )
    if bias is not None:
        _check_bias(bias, n, out_name)
    _check_out_scale(out_scale, out_name)
    if amax is not None:
        specs.check_written(amax, (1,), "float32")
    specs.check_same_device(a, weight, scale_a, scale_b, bias, out_scale, amax)
    readings = reading_a, reading_b
    return Product(a, weight, m, n, k, lda, ldb, scale_a, scale_b, *readings, bias, out_name, out_scale, amax)


def transposed(b: TensorSpec) -> TensorSpec:
    """Return b ``[k, n]`` seen as the weight ``[n, k]`` that it is the transpose of."""
    if len(b.shape) != 2:
        raise ShapeError(f"{b.name} needs two axes [k, n], got shape {b.shape}")
    return b._replace(shape=(b.shape[1], b.shape[0]), strides=(b.strides[1], b.strides[0]))


ACTIVATIONS: Final = get_args(Activation)[1:]
"""The names of activations."""


def known_activation(name: object) -> Activation:
    """Check and return the name of an activation; an empty string for None.

    Raises:
        DTypeError: there is no such activation.
    """
    if name is None:
        return ""
    if not checks.is_one_of(name, ACTIVATIONS):
        raise DTypeError(f"activation needs None or one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return name  # type: ignore[return-value]


def checked_beta(beta: float, out: TensorSpec | None, dtype: str) -> float:
    """Check and return beta: the factor of the values that ``out`` holds before the call.

    Raises:
        DTypeError: beta is not 0 for a result in FP8.
        ScaleError: beta is not a finite number in float32.
        LayoutError: beta is not 0 and there is no ``out``.
    """
    if not abs(beta) <= checks.LARGEST_FLOAT32 or not checks.in_float32(beta):
        raise ScaleError(f"beta needs a finite number that float32 holds, got {beta}")
    if beta and dtype in FORMATS:
        raise DTypeError(f"beta needs a result of {', '.join(HIGH_PRECISION)}, got {dtype}")
    if beta and out is None:
        raise LayoutError(f"beta needs out, whose values it scales and adds, got beta={beta} without out")
    return beta


def _check_bias(bias: TensorSpec, n: int, out: str) -> None:
    specs.check_vector(bias, n)
    if bias.dtype != "float32" and (bias.dtype != out or bias.dtype not in HIGH_PRECISION):
        own = f"the dtype of the result, {out}, or " if out in HIGH_PRECISION and out != "float32" else ""
        raise DTypeError(f"{bias.name} needs {own}float32, got {bias.dtype}")


def _check_out_scale(scale: TensorSpec | None, out: str) -> None:
    if out in FORMATS:
        if scale is None:
            raise ScaleError(f"out_scale needs a number for a result of {out}, got None")
        scale_shapes.check_scale_dtype(scale)
        scale_shapes.check_one_number(scale)
    elif scale is not None:
        raise ScaleError(f"out_scale needs an FP8 out_dtype, got {out}")
