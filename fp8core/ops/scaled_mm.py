"""Scaled matrix products of FP8 matrices."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fp8core import interop
from fp8core.core import operands, signature
from fp8core.core.calls import Calls
from fp8core.errors import ShapeError
from fp8core.interop import Maker, TensorView
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.product import Product, product_of
from fp8core.problem import ScaledMm


@dataclass(frozen=True, slots=True)
class Prepared:
    """A product that has been checked, for any arrays that look alike."""

    stream: Callable[[], int]
    launch: Any
    """None where there is nothing to compute."""
    new_scratch: Maker | None
    """None where the launch needs none."""
    new: Maker | None
    """None where the caller gives the result."""
    give: Callable[[Any, int], Any] | None
    """What makes the caller's array of the one that was allocated, where the framework has to."""


_CALLS: Calls[Prepared] = Calls()


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
    return _product(
        a,
        b,
        scale_a,
        scale_b,
        bias,
        out_dtype,
        out_scale,
        amax,
        use_fast_accum,
        batch_invariant,
        out,
        stream,
        stored=False,
    )


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
    return _product(
        a,
        weight,
        scale_a,
        scale_b,
        bias,
        out_dtype,
        out_scale,
        amax,
        use_fast_accum,
        batch_invariant,
        out,
        stream,
        stored=True,
    )


def _product(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any,
    out_dtype: Any,
    out_scale: Any,
    amax: Any,
    use_fast_accum: bool,
    batch_invariant: bool,
    out: Any,
    stream: Any,
    *,
    stored: bool,
) -> Any:
    if bias is None and out_scale is None and amax is None and out is None:  # for most calls half of the looks
        (a_at, b_at, scale_a_at, scale_b_at), looks = signature.looks(a, b, scale_a, scale_b)
        bias_at = out_scale_at = amax_at = out_at = 0
    else:
        addresses, looks = signature.looks(a, b, scale_a, scale_b, bias, out_scale, amax, out)
        a_at, b_at, scale_a_at, scale_b_at, bias_at, out_scale_at, amax_at, out_at = addresses
    bits = (a_at | b_at | out_at) & 15 | ((scale_a_at | scale_b_at | bias_at | amax_at) & 15) << 4
    key = None if looks is None else (looks, bits, out_dtype, use_fast_accum, batch_invariant, stored)
    call = _CALLS.get(key) if stream is None else None
    if call is None:
        product = product_of(
            interop.view(a, "a"),
            interop.view(b, "weight") if stored else _stored(b),
            interop.view(scale_a, "scale_a"),
            interop.view(scale_b, "scale_b"),
            bias,
            out_dtype,
            out_scale,
            amax,
            stored=stored,
        )
        call, out_at = planned(product, use_fast_accum, batch_invariant, out)
        _CALLS.keep(key, call)
        work = interop.stream_of(product.a, stream, *product.others)
        a_at, b_at, scale_a_at, scale_b_at, bias_at, out_scale_at, amax_at = product.addresses
    else:
        work = call.stream()
    pool = None if stream is None else work
    result = out
    if call.new is not None:
        out_at, result = call.new(pool)
    if call.launch is not None:
        scratch_at, _scratch = (0, None) if call.new_scratch is None else call.new_scratch(pool)
        call.launch(work, a_at, b_at, scale_a_at, scale_b_at, bias_at, out_at, out_scale_at, amax_at, scratch_at)
    return result if call.give is None or call.new is None else call.give(result, work)


def destined(product: Product, out: object) -> tuple[int, int]:
    """Return the address of a checked ``out``, 0 for a result yet to be allocated, and the stride of its rows."""
    if out is None:
        return 0, product.n
    there = interop.view(out, "out", written=True)
    operands.same_device(product.a, "a", out=there)
    return there.pointer, operands.written(there, "out", shape_of(product), product.out).stride


def shape_of(product: Product) -> tuple[int, ...]:
    """Return the shape of a product's result."""
    return (*product.a.shape[:-1], product.n)


def prepared(product: Product, launch: Any, out: object) -> Prepared:
    """Return a checked product with its launch, None where there is nothing to compute, made ready."""
    framework, target = product.a.framework, product.a.target
    new = framework.maker(shape_of(product), product.out, target) if out is None else None
    bytes_ = 0 if launch is None else launch.scratch_bytes
    new_scratch = framework.scratch_maker(bytes_, target) if bytes_ else None
    give = framework.give if framework.wraps else None
    return Prepared(framework.asking_stream(target), launch, new_scratch, new, give)


def planned(
    product: Product, use_fast_accum: bool, batch_invariant: bool, out: object, prefetch_weight: bool = False
) -> tuple[Prepared, int]:
    """Return a checked product made ready, and the address of ``out``, 0 for a result yet to be allocated.

    ``prefetch_weight``: what wrote the weight ended before the stream's last launch began, so that the product may read
    the weight before it waits for that launch.
    """
    out_at, ldo = destined(product, out)
    launch: Any = None
    if product.m and product.n:
        launch = SCALED_MM.plan(product.key(use_fast_accum, batch_invariant, out_at, ldo, prefetch_weight))
    return prepared(product, launch, out), out_at


def _stored(b: object) -> TensorView:
    """Return b ``[k, n]`` seen as the weight ``[n, k]`` that it is the transpose of."""
    view = interop.view(b, "b")
    if len(view.shape) != 2:
        raise ShapeError(f"b needs two axes [k, n], got shape {view.shape}")
    return view._replace(shape=(view.shape[1], view.shape[0]), strides=(view.strides[1], view.strides[0]))


def problem_of_scaled_mm(call: SimpleNamespace) -> ScaledMm:
    """Return the problem that `scaled_mm` with the arguments ``call`` poses; a new result counts as aligned."""
    return _problem(call, _stored(call.b), stored=False)


def problem_of_scaled_mm_nt(call: SimpleNamespace) -> ScaledMm:
    """Return the problem that `scaled_mm_nt` with the arguments ``call`` poses; a new result counts as aligned."""
    return _problem(call, interop.view(call.weight, "weight"), stored=True)


def _problem(call: SimpleNamespace, weight: TensorView, *, stored: bool) -> ScaledMm:
    p = product_of(
        interop.view(call.a, "a"),
        weight,
        interop.view(call.scale_a, "scale_a"),
        interop.view(call.scale_b, "scale_b"),
        call.bias,
        call.out_dtype,
        call.out_scale,
        call.amax,
        stored=stored,
    )
    there = interop.view(call.out, "out") if call.out is not None else None
    ldo = operands.matrix(there, "out").stride if there is not None else p.n
    return p.problem(call.use_fast_accum, call.batch_invariant, there.pointer if there is not None else 0, ldo)
