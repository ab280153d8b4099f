"""A linear layer's call: the input's quantization into one scratch, then the product."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fp8core import interop
from fp8core.core import operands
from fp8core.core.calls import Calls
from fp8core.core.scaling import EPS, Scaling, alignment, scaling
from fp8core.errors import ScaleError
from fp8core.interop import Maker, TensorView
from fp8core.interop.dlpack import contiguous
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.linear.table import LINEAR
from fp8core.kernels.quantize import QUANTIZE, bind
from fp8core.ops.product import Product, product_of
from fp8core.ops.scaled_mm import Prepared, destined, planned, prepared
from fp8core.problem import FORMATS, PER_TENSOR, Linear, Quantize, ScaledMm
from fp8core.table import Explanation, Launch

SCRATCH_ALIGNMENT = 256


class Layer(NamedTuple):
    """What a linear layer is, apart from its input."""

    weight: object
    weight_scale: object
    bias: object
    input_scale: object
    group_shape: tuple[int, int]
    scale_ub: object
    out_dtype: object
    use_fast_accum: bool
    batch_invariant: bool
    prefetch_weight: bool
    """Whether what wrote the weight has ended for certain, so that the product may read it early."""


class _Quantization(NamedTuple):
    """The quantization of an input: the problem, and where codes and scales lie in a scratch."""

    how: Scaling
    at: operands.Matrix
    key: tuple[Any, ...]
    scale_shape: tuple[int, ...]
    scale_strides: tuple[int, int]
    scale_offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """A linear layer checked for inputs that look alike: its launches, and where things lie in its scratch."""

    quantize: Launch | None
    """With all of its numbers; None where the product takes x as it is, and where x is empty."""
    new_scratch: Maker | None
    """None where the product takes x as it is."""
    scale_offset: int | None
    """Where the scales begin in the scratch; None where they are given."""
    product: Prepared


def _quantization(x: TensorView, weight_dtype: str, layer: Layer) -> _Quantization:
    operands.is_wide(x, "x")
    at = operands.matrix(x, "x")
    how = scaling(
        weight_dtype, layer.group_shape, layer.input_scale, layer.scale_ub, "float32", "k", EPS, x, at.rows, at.cols
    )
    rows, cols = how.group_shape.scale_shape(at.rows, at.cols)
    per_tensor = how.group_shape == PER_TENSOR
    layout = "mn" if cols > 1 and how.given is None else "k"  # groups as block-scaled products want them
    strides = how.strides if how.given is not None else (0, 0) if per_tensor else (1, rows)
    key = (
        x.target,
        x.dtype,
        weight_dtype,
        how.group_shape,
        how.given is not None,
        how.scale_format,
        layout,
        at.cols,
        alignment(x, at, how, at.rows, 0, at.cols),
    )
    offset = -(-at.rows * at.cols // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    scales = 0 if how.given is not None else rows * cols
    return _Quantization(how, at, key, (1,) if per_tensor else (rows, cols), strides, offset, offset + 4 * scales)


def _product(x: TensorView, q: _Quantization | None, layer: Layer) -> Product:
    """Return the product of x, or of the codes and scales that its quantization leaves at address 0 of a scratch."""
    weight, weight_scale = interop.view(layer.weight, "weight"), interop.view(layer.weight_scale, "weight_scale")
    if q is None:
        codes, scale = x, interop.view(layer.input_scale, "input_scale")
        dtype = "bfloat16" if layer.out_dtype is None else layer.out_dtype
    else:
        codes = x._replace(pointer=0, dtype=weight.dtype, strides=contiguous(x.shape))
        strides = q.scale_strides[: len(q.scale_shape)]
        scale = q.how.given or x._replace(pointer=q.scale_offset, dtype="float32", shape=q.scale_shape, strides=strides)
        dtype = x.dtype if layer.out_dtype is None else layer.out_dtype
    return product_of(codes, weight, scale, weight_scale, layer.bias, dtype, None, None, stored=True)


def _quantization_of(x: TensorView, layer: Layer) -> _Quantization | None:
    if x.dtype not in FORMATS:
        return _quantization(x, interop.view(layer.weight, "weight").dtype, layer)
    if layer.input_scale is None:
        raise ScaleError(f"x of {x.dtype} needs input_scale")
    return None


def _problem(q: _Quantization, product: ScaledMm) -> Linear:
    """Return a quantization and the product of its codes as one problem."""
    bound = None if q.how.upper is not None else q.how.upper_value
    return Linear(Quantize(*q.key), product, q.at.stride, bound)


def _prepare(layer: Layer, q: _Quantization | None, product: Product, out: object) -> tuple[Call, int]:
    """Return a checked call, and the address of ``out`` (0 without one)."""
    options = layer.use_fast_accum, layer.batch_invariant
    if q is None:
        ready, out_at = planned(product, *options, out, layer.prefetch_weight)
        return Call(None, None, None, ready), out_at
    out_at, ldo = destined(product, out)
    launch: Launch | None = None
    multiply: Launch | None = None
    if product.m and product.n:
        problem = product.problem(*options, out_at, ldo, layer.prefetch_weight)
        launch, multiply = LINEAR.plan(_problem(q, problem))
    ready = prepared(product, multiply, out)
    if launch is None and product.k:
        return Call(None, None, None, ready), out_at
    if launch is not None:
        at = q.at
        numbers = (at.stride, at.cols, *q.scale_strides, at.rows, at.rows, q.how.upper_value, EPS)
        launch = bind(launch, *numbers)
    new_scratch = product.a.framework.scratch_maker(max(q.bytes, 1), product.a.target)
    return Call(launch, new_scratch, None if q.how.given is not None else q.scale_offset, ready), out_at


def forward(
    layer: Layer,
    addresses: Sequence[int],
    calls: Calls[Call],
    key: tuple[Any, ...] | None,
    x: Any,
    x_at: int,
    out: Any,
    out_at: int,
    stream: Any,
) -> Any:
    """Run a layer; ``addresses`` are those of weight, weight_scale, bias and input_scale.

    Scratches live, in local names, until the launches that use them have been made.
    """
    call = calls.get(key) if stream is None else None
    upper_at = 0
    if call is None:
        view = interop.view(x, "x")
        q = _quantization_of(view, layer)
        posed = _product(view, q, layer)
        call, out_at = _prepare(layer, q, posed, out)
        if q is None or q.how.upper is None:
            calls.keep(key, call)
        others = posed.others if q is None else (*posed.others, *q.how.others)
        work = interop.stream_of(view, stream, *others)
        _, weight_at, given_at, weight_scale_at, bias_at, _, _ = posed.addresses
        x_at, upper_at = view.pointer, 0 if q is None else q.how.upper_pointer
    else:
        work = call.product.stream()
        weight_at, weight_scale_at, bias_at, given_at = addresses
    product = call.product
    pool = None if stream is None else work
    a_at, scale_at, result = x_at, given_at, out
    if call.new_scratch is not None:
        a_at, _scratch = call.new_scratch(pool)
        scale_at = given_at if call.scale_offset is None else a_at + call.scale_offset
    if product.new is not None:
        out_at, result = product.new(pool)
    if product.launch is not None:
        if call.quantize is not None:
            call.quantize(work, x_at, a_at, scale_at, upper_at)
        more_at, _more = (0, None) if product.new_scratch is None else product.new_scratch(pool)
        product.launch(work, a_at, weight_at, scale_at, weight_scale_at, bias_at, out_at, 0, 0, more_at)
    return result if product.give is None or product.new is None else product.give(result, work)


def explanation(x: object, layer: Layer) -> Explanation:
    """Return which kernels a call with x would get, and why: one for all, or one to quantize and one to multiply."""
    view = interop.view(x, "x")
    q = _quantization_of(view, layer)
    product = _product(view, q, layer)
    problem = product.problem(layer.use_fast_accum, layer.batch_invariant, 0, product.n, layer.prefetch_weight)
    explained = SCALED_MM.explain(problem)
    if q is None:
        return explained
    ways = LINEAR.explain(_problem(q, problem))
    if ways.chosen == "fused":
        return ways
    return explained._replace(before=(QUANTIZE.explain(Quantize(*q.key)), ways))
