"""The operands of a scaled product: what has to fit together before anything is launched."""

from typing import Any, NamedTuple

from fp8core import interop
from fp8core.core import operands, scales
from fp8core.errors import DTypeError, LayoutError, ScaleError, ShapeError
from fp8core.interop import TensorView
from fp8core.problem import FORMATS, ITEMSIZE, WIDE, ScaledMm


class Product(NamedTuple):
    """The checked operands of a product."""

    a: TensorView
    b: TensorView
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    scale_a: TensorView
    scale_b: TensorView
    reading_a: scales.Reading
    reading_b: scales.Reading
    bias: TensorView | None
    out: str
    out_scale: TensorView | None
    amax: TensorView | None

    @property
    def others(self) -> list[TensorView]:
        """The operands beside a."""
        optional = (self.bias, self.out_scale, self.amax)
        return [self.b, self.scale_a, self.scale_b, *(view for view in optional if view is not None)]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of a, b, scale_a, scale_b, bias, out_scale and amax; 0 where there is none."""
        return (
            self.a.pointer,
            self.b.pointer,
            self.scale_a.pointer,
            self.scale_b.pointer,
            *(0 if view is None else view.pointer for view in (self.bias, self.out_scale, self.amax)),
        )

    def key(
        self, use_fast_accum: bool, batch_invariant: bool, pointer: int, ldo: int, prefetch_weight: bool = False
    ) -> tuple[Any, ...]:
        """Return the fields of the problem with a result at ``pointer``, its rows ``ldo`` elements apart."""
        size = ITEMSIZE[self.out]
        return (
            self.a.target,
            self.m,
            self.n,
            self.k,
            self.a.dtype,
            self.b.dtype,
            self.out,
            self.reading_a.granularity,
            self.reading_b.granularity,
            self.reading_a.strides,
            self.reading_b.strides,
            self.bias.dtype if self.bias is not None else "",
            self.out_scale is not None,
            self.amax is not None,
            use_fast_accum,
            batch_invariant,
            self.lda,
            self.ldb,
            ldo,
            operands.alignment(self.a.pointer, self.b.pointer, self.lda, self.ldb, pointer, ldo * size),
            operands.alignment(
                self.scale_a.pointer,
                self.scale_b.pointer,
                self.bias.pointer if self.bias is not None else 0,
                self.amax.pointer if self.amax is not None else 0,
            ),
            prefetch_weight,
        )

    def problem(
        self, use_fast_accum: bool, batch_invariant: bool, pointer: int, ldo: int, prefetch_weight: bool = False
    ) -> ScaledMm:
        """Return the problem with a result at ``pointer``, its rows ``ldo`` elements apart."""
        return ScaledMm(*self.key(use_fast_accum, batch_invariant, pointer, ldo, prefetch_weight))


def product_of(
    a: TensorView,
    weight: TensorView,
    scale_a: TensorView,
    scale_b: TensorView,
    bias: object,
    out_dtype: object,
    out_scale: object,
    amax: object,
    *,
    stored: bool,
) -> Product:
    """Return the operands of a product after checking that they fit together.

    ``weight`` is ``[n, k]``; ``stored`` says that the caller gave it so, and scale_b in its orientation.
    """
    operands.is_fp8(a, "a")
    operands.is_fp8(weight, "weight" if stored else "b")
    m, k, lda = operands.matrix(a, "a")
    if len(weight.shape) != 2:
        raise ShapeError(f"weight needs two axes [n, k], got shape {weight.shape}")
    n, weight_k = weight.shape
    if weight_k != k:
        got = f"weight{weight.shape}" if stored else f"b{(weight_k, n)}"
        raise ShapeError(
            f"a and {'weight' if stored else 'b'} must share k: got a{a.shape} with k={k} and {got} with k={weight_k}"
        )
    ldb = weight.strides[0] if n > 1 and k else k
    if n and ((k > 1 and weight.strides[1] != 1) or ldb < k):
        name, wanted = (
            ("weight", "contiguous rows [n, k]") if stored else ("b", "contiguous columns [k, n], as weight.T has them")
        )
        raise LayoutError(f"{name} needs {wanted}, got strides {weight.strides} (elements) over (n, k)")
    scales.is_scale(scale_a, "scale_a")
    scales.is_scale(scale_b, "scale_b")
    reading_a = scales.activation(scale_a, a.shape[:-1], m, k)
    reading_b = scales.weight(scale_b, n, k, stored=stored, grouped=reading_a.granularity == "group")
    reading_a = _paired(reading_a, reading_b, k)
    out_name = interop.dtype_name(out_dtype)
    bias_view = interop.view(bias, "bias") if bias is not None else None
    if bias_view is not None:
        _check_bias(bias_view, n, out_name)
    out_scale_view = interop.view(out_scale, "out_scale") if out_scale is not None else None
    _check_out_scale(out_scale_view, out_name)
    amax_view = interop.view(amax, "amax", written=True) if amax is not None else None
    if amax_view is not None:
        operands.check_written(amax_view, "amax", (1,), "float32")
    operands.same_device(
        a, "a", b=weight, scale_a=scale_a, scale_b=scale_b, bias=bias_view, out_scale=out_scale_view, amax=amax_view
    )
    return Product(
        a,
        weight,
        m,
        n,
        k,
        lda,
        ldb,
        scale_a,
        scale_b,
        reading_a,
        reading_b,
        bias_view,
        out_name,
        out_scale_view,
        amax_view,
    )


def _paired(a: scales.Reading, b: scales.Reading, k: int) -> scales.Reading:
    """Return scale_a's reading next to scale_b's: groups go with groups or blocks, and only with them."""
    a_grouped, b_grouped = a.granularity == "group", b.granularity in ("group", "block")
    if a_grouped == b_grouped:
        return a
    if b_grouped and k <= scales.BLOCK:
        return scales.Reading("group", a.strides)
    if b_grouped:
        kind = "128x128 block" if b.granularity == "block" else "1x128 group"
        raise ScaleError(
            f"scale_b with one scale per {kind} needs scale_a "
            f"for groups of 1x128 (quantize a with group_shape=(1, 128)), got one per {a.granularity}"
        )
    raise ScaleError(
        f"scale_a for groups of 1x128 needs scale_b for 128x128 blocks or 1x128 groups, got one per {b.granularity}"
    )


def _check_bias(bias: TensorView, n: int, out: str) -> None:
    if bias.shape != (n,) or (n > 1 and bias.strides != (1,)):
        raise ShapeError(f"bias needs {n} contiguous elements, got shape {bias.shape} with strides {bias.strides}")
    if bias.dtype != "float32" and (bias.dtype != out or bias.dtype not in WIDE):
        raise DTypeError(f"bias needs the dtype of the result, {out}, or float32, got {bias.dtype}")


def _check_out_scale(view: TensorView | None, out: str) -> None:
    if out in FORMATS:
        if view is None:
            raise ScaleError(f"an FP8 result ({out}) needs out_scale")
        scales.is_scale(view, "out_scale")
        scales.one_number(view, "out_scale")
    elif out not in WIDE:
        raise DTypeError(f"out_dtype needs {', '.join(WIDE)} or an FP8 dtype, got {out}")
    elif view is not None:
        raise ScaleError(f"out_scale needs an FP8 out_dtype, got {out}")
