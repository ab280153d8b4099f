"""Array interop: arrays of any framework in, as views that kernels can use, and results of the same framework out.

Nothing is copied in either direction, and no framework is imported: one is found in `sys.modules` when an array
of its arrives.
"""

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from operator import index
from typing import Any

from fp8core.errors import DeviceError, DTypeError
from fp8core.interop.eager import eager_only
from fp8core.interop.float8 import Float8Array
from fp8core.interop.frameworks import framework_of
from fp8core.interop.names import Operand, ScaleOperand, dtype_name, type_name
from fp8core.interop.ordering import order_after, order_before
from fp8core.interop.scalars import scalar
from fp8core.interop.tensor import Allocator, Framework, Result, TensorView
from fp8core.problem import Target

__all__ = [
    "Allocator",
    "Framework",
    "Operand",
    "Result",
    "ScaleOperand",
    "TensorView",
    "check_writable",
    "declared",
    "dtype_name",
    "eager_only",
    "framework_of",
    "order_after",
    "order_before",
    "reinterpret",
    "scalar",
    "stream_address",
    "stream_of",
    "view",
    "wrote",
]


@eager_only
def view(x: Any, name: str, *, written: bool = False) -> TensorView:
    """Return a view of the array ``x``; nothing is copied.

    Args:
        x: an array of NumPy, CuPy, PyTorch or JAX, a Float8Array, or anything else that offers DLPack or
            ``__cuda_array_interface__``, of a dtype in `problem.ITEMSIZE`. Whether it requires grad does not matter.
        name: what errors call the operand.
        written: the operand is a destination.

    Raises:
        DTypeError: it is not an array, or its dtype is none of ours or not in the machine's byte order.
        LayoutError: it has no strided memory of its own, or is a destination and cannot be written to.
        DeviceError: it lies on a device that kernels cannot be launched on.
    """
    kind: Any = type(x)
    read = _reader(kind)
    if read is None:
        wanted = "a number or an array" if isinstance(name, ScaleOperand) else "an array"
        if x is None:
            raise DTypeError(f"{name} needs {wanted}, got None")
        raise DTypeError(f"{name} needs {wanted} that offers DLPack, got {type_name(x)}")
    seen: TensorView = read(x, name)
    if written:
        seen.framework.written(_storage_of(x), name)
    return seen


def declared(x: Any, name: str) -> tuple[str, Target]:
    """Return the dtype and the device of an array; of a tensor that is traced, too, which has no memory.

    Raises:
        DTypeError, LayoutError, DeviceError: as for `view`.
    """
    framework = None if isinstance(x, Float8Array) else framework_of(type(x))
    if framework is not None:
        return framework.declared(x, name)
    seen = view(x, name)
    return seen.dtype, seen.target


def stream_of(first: TensorView, stream: Any = None, *others: TensorView) -> int:
    """Return the stream to launch on: ``stream`` if given, else the one that the framework of ``first`` works on.

    Args:
        first: the operand whose framework decides, and whose device it is.
        stream: an address (0 is the default stream), or an object with ``__cuda_stream__``, ``.ptr`` or
            ``.cuda_stream``.
        others: the other operands, for a caller that does without `order_before`.

    Returns:
        The stream's address; 0 on the host, which has none.

    Raises:
        DeviceError: ``stream`` is nothing of that kind.
    """
    given = None if stream is None else stream_address(stream)
    if first.target.platform == "host":
        return 0
    chosen = first.framework.stream(first.target) if given is None else given
    if others or first.held is not None:
        order_before(chosen, (first, *others), stream)
    return chosen


def stream_address(stream: Any) -> int:
    """Return the address of a stream that a caller gave; raises DeviceError for what is none."""
    address = stream
    integral = hasattr(type(stream), "__index__")
    offer = getattr(stream, "__cuda_stream__", None)
    if offer is not None:
        with suppress(TypeError, IndexError, KeyError):  # a class, or no pair: nothing of the kind
            address = (offer() if callable(offer) else offer)[1]
    elif not integral:
        address = next((at for name in ("ptr", "cuda_stream") if (at := getattr(stream, name, None)) is not None), None)
    if hasattr(type(address), "__index__") and not isinstance(address, bool):
        with suppress(TypeError):  # an array of several numbers has it, too
            number = index(address)
            if not 0 <= number < 1 << 64:
                raise DeviceError(f"stream needs an address, 0 or more, got {number}")
            return number
    raise DeviceError(
        f"stream needs an address or an object with __cuda_stream__, .ptr or .cuda_stream, got {type(stream).__name__}"
    )


@cache
def _reader(cls: type) -> Any:
    if issubclass(cls, Float8Array):
        from fp8core.interop import cupy_arrays

        return cupy_arrays.view_float8
    framework = framework_of(cls)
    return None if framework is None else framework.view


def _storage_of(x: Any) -> Any:
    return x.codes if isinstance(x, Float8Array) else x


def check_writable(x: Any, name: str) -> None:
    """Raise LayoutError if ``x`` must not be written to."""
    memory = _storage_of(x)
    framework = framework_of(type(memory))
    if framework is not None:
        framework.written(memory, name)


def reinterpret(x: Any, dtype: str) -> Any:
    """Return an array of the framework of ``x`` over its memory, whose elements of one byte are of ``dtype``."""
    framework = framework_of(type(_storage_of(x)))
    assert framework is not None
    return framework.reinterpret(x, dtype)


def wrote(arrays: Iterable[Any]) -> None:
    """Take note that ``arrays``, of any frameworks, were written in place."""
    for x in arrays:
        framework = framework_of(type(_storage_of(x)))
        if framework is not None and framework.wrote is not None:
            framework.wrote((x,))
