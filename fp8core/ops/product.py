"""Scaled matrix products of FP8 matrices."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from fp8core import arrays
from fp8core.arrays import TensorView
from fp8core.errors import DTypeError, LayoutError, ScaleError, ShapeError
from fp8core.kernels.scaled_mm import SCALED_MM
from fp8core.ops import operands, scales
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

    def key(self, use_fast_accum: bool, batch_invariant: bool, pointer: int, ldo: int) -> tuple[Any, ...]:
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
        )

    def problem(self, use_fast_accum: bool, batch_invariant: bool, pointer: int, ldo: int) -> ScaledMm:
        """Return the problem with a result at ``pointer``, its rows ``ldo`` elements apart."""
        return ScaledMm(*self.key(use_fast_accum, batch_invariant, pointer, ldo))


def scaled_mm(
    a: object,
    b: object,
    scale_a: object,
    scale_b: object,
    *,
    bias: object = None,
    out_dtype: object = "bfloat16",
    out_scale: object = None,
    amax: object = None,
    use_fast_accum: bool = True,
    batch_invariant: bool = False,
    out: object = None,
    stream: object = None,
) -> Any:
    """Return ``round(scale_a * (scale_b * (a @ b)) + bias)``: fp32 accumulation, one rounding.

    Args:
        a: FP8 ``[..., m, k]``, rows contiguous.
        b: FP8 ``[k, n]``, columns contiguous: ``weight.T`` of a stored ``[n, k]``.
        scale_a: fp32; one number, ``[m, 1]`` or ``[m]`` per token, or ``[m, ceil(k / 128)]`` for 1x128 groups.
        scale_b: fp32; one number, ``[1, n]``, ``[n]`` or ``[n, 1]`` per channel, or, with groups of a,
            ``[ceil(k / 128), ceil(n / 128)]`` for 128x128 blocks or ``[ceil(k / 128), n]`` for 1x128 groups.
        bias: ``[n]`` in out_dtype or fp32, added in fp32.
        out_dtype: bfloat16, float16, float32, or an FP8 format together with out_scale.
        out_scale: fp32 of one number: codes are the clamped, rounded ``value * (1 / out_scale)``.
        amax: an fp32 array of one that receives the largest magnitude of the result before it is rounded.
        use_fast_accum: let the tensor cores accumulate with fewer bits (relative error 3e-3 against 2e-3).
        batch_invariant: give a row the same bits whatever m is.
        out: an array ``[..., m, n]`` of out_dtype for the result.
        stream: the stream to launch on; by default the one that the framework of a works on.

    Raises:
        ShapeError, DTypeError, LayoutError, ScaleError, DeviceError: before anything is launched or written.
        UnsupportedProblemError: no kernel can run it, as for e5m2 times e5m2.
    """
    product = product_of(
        arrays.view(a, "a"),
        _stored(b),
        arrays.view(scale_a, "scale_a"),
        arrays.view(scale_b, "scale_b"),
        bias,
        out_dtype,
        out_scale,
        amax,
        stored=False,
    )
    return run(product, use_fast_accum, batch_invariant, out, stream)


def scaled_mm_nt(
    a: object,
    weight: object,
    scale_a: object,
    scale_b: object,
    *,
    bias: object = None,
    out_dtype: object = "bfloat16",
    out_scale: object = None,
    amax: object = None,
    use_fast_accum: bool = True,
    batch_invariant: bool = False,
    out: object = None,
    stream: object = None,
) -> Any:
    """Return `scaled_mm` of a and a weight as it is stored, ``[n, k]``.

    ``scale_b`` has the weight's orientation: ``[n, 1]`` per channel, ``[ceil(n / 128), ceil(k / 128)]`` for
    blocks, ``[n, ceil(k / 128)]`` for groups. All else is as for `scaled_mm`.
    """
    product = product_of(
        arrays.view(a, "a"),
        arrays.view(weight, "weight"),
        arrays.view(scale_a, "scale_a"),
        arrays.view(scale_b, "scale_b"),
        bias,
        out_dtype,
        out_scale,
        amax,
        stored=True,
    )
    return run(product, use_fast_accum, batch_invariant, out, stream)


def _stored(b: object) -> TensorView:
    """Return b ``[k, n]`` seen as the weight ``[n, k]`` that it is the transpose of."""
    view = arrays.view(b, "b")
    if len(view.shape) != 2:
        raise ShapeError(f"b needs two axes [k, n], got shape {view.shape}")
    return view._replace(shape=(view.shape[1], view.shape[0]), strides=(view.strides[1], view.strides[0]))


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
    out_name = arrays.dtype_name(out_dtype)
    bias_view = arrays.view(bias, "bias") if bias is not None else None
    if bias_view is not None:
        _check_bias(bias_view, n, out_name)
    out_scale_view = arrays.view(out_scale, "out_scale") if out_scale is not None else None
    _check_out_scale(out_scale_view, out_name)
    amax_view = arrays.view(amax, "amax", written=True) if amax is not None else None
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


def run(
    p: Product,
    use_fast_accum: bool,
    batch_invariant: bool,
    out: object,
    stream: object,
    before: Callable[[], None] | None = None,
) -> Any:
    """Allocate what is missing, launch the product, and return its result in the framework of a.

    ``before`` is launched first, once nothing can be refused any more.
    """
    framework, target = p.a.framework, p.a.target
    shape = (*p.a.shape[:-1], p.n)
    if out is not None:
        there = arrays.view(out, "out", written=True)
        operands.same_device(p.a, "a", out=there)
        pointer, ldo = there.pointer, operands.written(there, "out", shape, p.out).stride
    work = arrays.stream_of(p.a, stream, *p.others)
    pool = None if stream is None else work
    if out is None:
        result = framework.empty(shape, p.out, target, None, pool)
        pointer, ldo = result.pointer, p.n
    if p.m and p.n:
        launch: Any = SCALED_MM.plan(p.key(use_fast_accum, batch_invariant, pointer, ldo))
        if before is not None:
            before()
        bytes_ = launch.scratch_bytes
        scratch = framework.scratch(bytes_, target, pool) if bytes_ else None
        launch(
            work,
            p.a.pointer,
            p.b.pointer,
            p.scale_a.pointer,
            p.scale_b.pointer,
            p.bias.pointer if p.bias is not None else 0,
            pointer,
            p.out_scale.pointer if p.out_scale is not None else 0,
            p.amax.pointer if p.amax is not None else 0,
            scratch.pointer if scratch is not None else 0,
        )
    return out if out is not None else framework.give(result, work)


def problem_of_scaled_mm(call: SimpleNamespace) -> ScaledMm:
    """Return the problem that `scaled_mm` with the arguments ``call`` poses; a new result counts as aligned."""
    return _problem(call, _stored(call.b), stored=False)


def problem_of_scaled_mm_nt(call: SimpleNamespace) -> ScaledMm:
    """Return the problem that `scaled_mm_nt` with the arguments ``call`` poses; a new result counts as aligned."""
    return _problem(call, arrays.view(call.weight, "weight"), stored=True)


def _problem(call: SimpleNamespace, weight: TensorView, *, stored: bool) -> ScaledMm:
    p = product_of(
        arrays.view(call.a, "a"),
        weight,
        arrays.view(call.scale_a, "scale_a"),
        arrays.view(call.scale_b, "scale_b"),
        call.bias,
        call.out_dtype,
        call.out_scale,
        call.amax,
        stored=stored,
    )
    there = arrays.view(call.out, "out") if call.out is not None else None
    ldo = operands.matrix(there, "out").stride if there is not None else p.n
    return p.problem(call.use_fast_accum, call.batch_invariant, there.pointer if there is not None else 0, ldo)
