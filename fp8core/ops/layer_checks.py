"""Checks made when an `Fp8Linear` is constructed, and whenever one of its arrays is assigned."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from fp8core import interop
from fp8core.core.operation import Interned, float32_number
from fp8core.core.prefetch import WeightHistory, capture_of
from fp8core.core.product import product_of
from fp8core.core.scale_shapes import check_scale_dtype, is_one_number, of_array
from fp8core.core.specs import TensorSpec, check_fp8, check_same_device, spec_of
from fp8core.dtypes import FORMATS, HIGH_PRECISION
from fp8core.errors import ScaleError, ShapeError
from fp8core.forks import ForkSafeLock
from fp8core.interop import Operand, TensorView, dlpack, dtype_name
from fp8core.interop.tensor import bytes_reached, fill_number
from fp8core.ops.linear import ARRAYS, LINEAR_CALLS, LinearOptions, input_format, result_dtype
from fp8core.ops.linear_scratch import COMPUTED
from fp8core.problem import BLOCK, GROUP_128, PER_TENSOR, PER_TOKEN, GroupShape


def _array_of(number: float, like: TensorView) -> Any:
    """Return a number as an fp32 array beside another, written on the current stream of its framework."""
    framework, target = like.framework, like.target
    made, stream = framework.empty((1,), "float32", target), framework.stream(target)
    fill_number(made.pointer, number, target, stream)
    return framework.wrap(made.array, stream, like.owner)


def _check_input_scale(scale: TensorSpec, group_shape: GroupShape, weight: TensorSpec) -> None:
    """Refuse an input scale unless it is one number or, for inputs that are already FP8, one per token or group."""
    check_scale_dtype(scale)
    shape, groups = scale.shape, -(-weight.shape[1] // BLOCK)
    if is_one_number(shape):
        return
    needs = "one number, of shape (), (1,) or (1, 1)"
    if group_shape == PER_TOKEN:
        if len(shape) == 1 or shape[-1:] == (1,):
            return
        needs = f"{needs}, or (m, 1) or (m,) per token"
    elif group_shape == GROUP_128:
        if len(shape) > 1 and shape[-1] == groups:
            return
        needs = f"{needs}, or (m, {groups}) by groups"
    raise ShapeError(f"{scale.name} needs {needs}, got shape {shape}")


class Read(NamedTuple):
    """The arrays of a layer in the order of `ARRAYS`, their views and their specs; None where one is left out."""

    arrays: tuple[Any, ...]
    views: tuple[TensorView | None, ...]
    specs: tuple[TensorSpec | None, ...]


class State(NamedTuple):
    """Everything that a call reads from a layer, in one object, as another thread may assign arrays meanwhile."""

    arrays: tuple[Any, ...]
    """In the order of `ARRAYS`."""
    interned: Interned
    by_group: dict[GroupShape | None, Interned]
    """The options of calls whose x is already quantized, by its group shape."""
    history: WeightHistory
    options: LinearOptions
    shape: tuple[int, int]
    """n and k of the weight."""
    dtype: str
    """The weight's."""
    scale_shape: tuple[int, ...]
    """The shape of the weight's scale."""


REPLACING: Final = ForkSafeLock()
"""Of the states of all layers. Without it, of two threads that assign two arrays of a layer, one would put the old
array of the other back."""


def state_of(options: LinearOptions, weight: Any, weight_scale: Any, bias: Any, input_scale: Any) -> State:
    """Check the arrays of a layer and return its state; the history of the weight starts anew."""
    layer = read_layer(weight, weight_scale, bias, input_scale)
    check_layer(options, layer.specs)
    at, scale, *_ = layer.specs
    assert at is not None
    assert scale is not None
    interned, history = LINEAR_CALLS.interned(options), history_of(layer)
    return State(layer.arrays, interned, {}, history, options, two_axes(at), at.dtype, scale.shape)


def read_layer(weight: Any, weight_scale: Any, bias: Any, input_scale: Any) -> Read:
    """Read the arrays of a layer; numbers become arrays on the weight's device."""
    first = interop.view(weight, ARRAYS[0])
    at = spec_of(first, "weight")
    check_fp8(at)
    two_axes(at)
    arrays: list[Any] = [weight]
    views: list[TensorView | None] = [first]
    for x, name in zip((weight_scale, bias, input_scale), ARRAYS[1:], strict=True):
        number = None if x is None or name == "bias" else float32_number(x, name)
        given = x if number is None else _array_of(number, first)
        arrays.append(given)
        views.append(None if given is None else interop.view(given, name))
    specs = [None if view is None else spec_of(view, name) for view, name in zip(views, ARRAYS, strict=True)]
    return Read(tuple(arrays), tuple(views), tuple(specs))


def two_axes(weight: TensorSpec) -> tuple[int, int]:
    """Return n and k of a weight."""
    if len(weight.shape) != 2:
        raise ShapeError(f"weight needs two axes [n, k], got shape {weight.shape}")
    n, k = weight.shape
    return n, k


def check_layer(options: LinearOptions, specs: Sequence[TensorSpec | None]) -> None:
    """Check the arrays of a layer, in the order of `ARRAYS`, as far as they can be without an input."""
    weight, scale, bias, input_scale = specs
    assert weight is not None
    if scale is None:
        raise ScaleError("weight needs weight_scale or to be a Quantized, as quantize returns it, got neither")
    check_same_device(weight, scale, bias, input_scale)
    if input_scale is not None:
        _check_input_scale(input_scale, options.group_shape, weight)
    check_product(options, weight, scale, bias, input_scale)


def history_of(layer: Read) -> WeightHistory:
    """Return a new history of a layer's weight."""
    history, first = WeightHistory(), layer.views[0]
    assert first is not None
    if first.target.platform != "host":
        addresses = [0, *(0 if view is None else view.pointer for view in layer.views)]
        reached = ((0, 0) if s is None else bytes_reached(s.shape, s.strides, s.dtype) for s in layer.specs)
        spans = [(0, 0), *reached]
        history.move_to(addresses, spans, capture_of(first.framework.stream(first.target)))
    return history


def check_product(
    options: LinearOptions,
    weight: TensorSpec,
    scale: TensorSpec,
    bias: TensorSpec | None,
    input_scale: TensorSpec | None,
) -> None:
    """Refuse a weight and options with which no input could be multiplied, tested with an input of two rows.

    (With one row, the shape of its scale would not tell its granularity.)
    """
    k, target = weight.shape[1], weight.target
    x = TensorSpec("x", input_format(weight.dtype), (2, k), (k, 1), target)
    given = input_scale is not None and is_one_number(input_scale.shape)
    group = PER_TENSOR if given else options.group_shape
    groups = {PER_TENSOR: (1,), PER_TOKEN: (2, 1), GROUP_128: (2, -(-k // BLOCK))}[group]
    x_scale = TensorSpec("input_scale" if given else COMPUTED, "float32", groups, (1,) * len(groups), target)
    own = "bfloat16" if bias is None or bias.dtype not in HIGH_PRECISION else bias.dtype
    product_of(
        x,
        weight,
        x_scale,
        scale,
        bias,
        result_dtype(options.out_dtype, own),
        stored=True,
        group_a=group,
        group_b=options.weight_group,
    )


def specs_before_quantizing(
    weight: Any, bias: Any, input_scale: Any, dtype: Any, group: GroupShape
) -> tuple[TensorSpec | None, ...]:
    """Return the specs that `read_layer` will return once the weight is quantized."""
    at = spec_of(interop.view(weight, Operand("weight", *HIGH_PRECISION)), "weight")
    n, k = two_axes(at)
    others: list[TensorSpec | None] = []
    for x, name in ((bias, ARRAYS[2]), (input_scale, ARRAYS[3])):
        if x is None:
            others.append(None)
        elif name != "bias" and float32_number(x, name) is not None:
            others.append(TensorSpec(name, "float32", (1,), (1,), at.target))
        else:
            others.append(spec_of(interop.view(x, name), name))
    codes = TensorSpec("weight", dtype_name(dtype, "dtype", FORMATS), (n, k), (k, 1), at.target)
    shape = of_array((n, k), group, "weight")
    return codes, TensorSpec("weight_scale", "float32", shape, dlpack.row_major(shape), at.target), *others
