"""The operations as operators of torch: ``torch.ops.fp8core.quantize`` and others.

The real kernel of an operator calls the operation, as an eager call does. The fake kernel calls the operation's
`describe`, so that shapes, dtypes and refusals have one source.
"""

from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from threading import local
from typing import Any, Final

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from fp8core.core.calls import NewArray
from fp8core.core.operation import Operation
from fp8core.core.prefetch import WEIGHT
from fp8core.core.specs import TensorSpec
from fp8core.dtypes import ITEMSIZE
from fp8core.errors import DeviceError, LayoutError
from fp8core.interop.tensor import refused_dtype
from fp8core.ops.linear import LINEAR_CALLS
from fp8core.runtime import device
from fp8core.target import HOST, Target
from fp8core.torch.histories import HISTORIES
from fp8core.torch.schemas import OPERATORS, Operator, Overload
from fp8core.torch.unbacked import extents, known
from fp8core.w8a8.operations import VARIANTS

LIBRARY: Final[Any] = torch.library.Library("fp8core", "DEF")  # type: ignore[no-untyped-call]
"""Keeps the operators defined."""
TAGS: Final = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
"""The second tag keeps strides as they are: the strides of a weight say which axis is contiguous."""
OPERATIONS: Final = {operator.name: (operator.operation, *VARIANTS.get(operator.name, ())) for operator in OPERATORS}
"""By the name of an operator: its operation, and those that differ from it in the names of their operands only."""


class _Traced(local):
    """By the name of an operator: the operation that this thread traces a call of."""

    def __init__(self) -> None:
        self.operations: dict[str, Operation] = {}


_TRACED: Final = _Traced()


def tracing(name: str, index: int) -> None:
    """Note, before an operator is called in a trace, which of its operations has the operands that errors name."""
    _TRACED.operations[name] = OPERATIONS[name][index]


tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run by torch.compile while it traces
_NAMES: Final = {getattr(torch, name): name for name in ITEMSIZE if hasattr(torch, name)}


def declared(x: torch.Tensor, name: str) -> tuple[str, Target]:
    """Return the dtype of a tensor without memory, and the device that it stands for."""
    dtype = _NAMES.get(x.dtype)
    if dtype is None:
        raise refused_dtype(name, x.dtype)
    return dtype, device.target(x.device.index) if x.device.type == "cuda" else HOST


def _spec(x: torch.Tensor | None, name: str) -> TensorSpec | None:
    """Return the spec of a tensor without memory, whose extents may be symbols."""
    if x is None:
        return None
    dtype, target = declared(x, name)
    return TensorSpec(name, dtype, extents(x.shape), extents(x.stride()), target)


def _refuse_some_on_meta(operands: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
    """Refuse meta tensors beside others: torch would run a fake kernel for a result with memory, which nobody writes.

    Raises:
        DeviceError: some operands are on the meta device, and others are not.
    """
    on_meta = {name: x.device.type == "meta" for x, name in zip(operands, names, strict=True) if x is not None}
    if len({*on_meta.values()}) > 1:
        name = next(name for name, without_memory in on_meta.items() if without_memory)
        raise DeviceError(f"{name} needs memory of a CUDA or ROCm device or the CPU, got meta")


def _new(array: NewArray, like: torch.Tensor) -> torch.Tensor:
    dtype, shape = getattr(torch, array.dtype), [known(extent) for extent in array.shape]
    if array.strides is None:
        return like.new_empty(shape, dtype=dtype)
    return like.new_empty_strided(shape, [known(stride) for stride in array.strides], dtype=dtype)


def _declared(overload: Overload) -> Callable[[Any], Any]:
    """Return a function that picks the results that the schema declares: none, one, or a tuple."""
    return itemgetter(*overload.new) if overload.new else lambda _: None


def _apart(operands: Sequence[Any], overload: Overload) -> tuple[Any, ...]:
    """Return operands with copies of those that are in the memory of one that the overload writes.

    In graphs they may be: inductor drops the copy in ``h.clone()`` where nothing needs h later, although the node that
    writes to the copy reads h.
    """
    written = {*overload.out, *(result for result, _ in overload.copied)}
    memory = {operands[at].untyped_storage().data_ptr() for at in written}

    def shares(x: Any) -> bool:
        return x is not None and x.untyped_storage().data_ptr() in memory

    return tuple([x.clone() if at not in written and shares(x) else x for at, x in enumerate(operands)])


def _real(operator: Operator, overload: Overload) -> Callable[..., Any]:
    operation, unpack, declared = operator.operation, operator.unpacker(overload), _declared(overload)

    def call(operands: Any, options: Any) -> Any:
        return operation(operands, options)

    def call_layer(operands: Any, options: Any) -> Any:
        return operation(operands, options, None, HISTORIES.of(operands[WEIGHT]))

    make = call_layer if operation is LINEAR_CALLS else call

    def run(*arguments: Any) -> Any:
        return declared(make(*unpack(*arguments))[0])

    def run_apart(*arguments: Any) -> Any:
        operands, options = unpack(*arguments)
        try:
            made = make(operands, options)
        except LayoutError:
            apart = _apart(operands, overload)
            if all(map(is_, apart, operands)):
                raise
            made = make(apart, options)
        return declared(made[0])

    return run_apart if overload.out else run


def _fake(operator: Operator, overload: Overload) -> Callable[..., Any]:
    operation, unpack, declared = operator.operation, operator.unpacker(overload), _declared(overload)

    def stand_in(*arguments: Any) -> Any:
        operands, options = unpack(*arguments)
        traced = _TRACED.operations.pop(operator.name, operation)
        _refuse_some_on_meta(operands, traced.operands)
        specs = [_spec(x, name) for x, name in zip(operands, traced.operands, strict=True)]
        results = traced.describe(specs, options).results
        return declared({at: _new(results[at], operands[0]) for at in overload.new})

    return stand_in


def _functionalized(
    mode: Any, operator: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
) -> Any:
    """Note in a trace what an operator writes, and pass it on to torch.

    Autograd reads the version counters of the traced tensors: they make it refuse a backward pass that needs earlier
    values. A run of the graph increments only those of tensors with memory.
    """
    declared = zip(arguments, operator._schema.arguments, strict=False)
    torch._C._increment_version(tuple([x for x, it in declared if it.is_write]))
    return mode.__torch_dispatch__(operator, types, arguments, keywords)


def _define(operator: Operator, overload: Overload) -> Callable[..., Any]:
    """Define an overload, and return it."""
    name = f"{operator.name}.{overload.name}" if overload.name else operator.name
    LIBRARY.define(name + operator.schema(overload), tags=TAGS)
    for key in ("CPU", "CUDA"):  # torch on ROCm says CUDA, too
        LIBRARY.impl(name, _real(operator, overload), key)
    # Results never require grad, like those of eager calls. Without this kernel they would, and backward would fail.
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"fp8core::{name}", _fake(operator, overload), lib=LIBRARY)
    if overload.out:
        torch.library.register_torch_dispatch(f"fp8core::{name}", FunctionalTensorMode, _functionalized, lib=LIBRARY)
    packet = getattr(torch.ops.fp8core, operator.name)
    made: Callable[..., Any] = getattr(packet, overload.name or "default")
    return made


OVERLOADS: Final = {
    (operator.name, overload.name): _define(operator, overload)
    for operator in OPERATORS
    for overload in operator.overloads
}
"""The overloads by operation name and overload name."""
