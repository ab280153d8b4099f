"""Array interop: reads arrays of any framework as views for kernels, and returns results as arrays of that framework.

Nothing is copied in either direction. No framework is imported: the module of an array's framework is already in
`sys.modules` when the array arrives.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

from fp8core.errors import DeviceError, DTypeError
from fp8core.interop.eager import eager_only
from fp8core.interop.float8 import Float8Array
from fp8core.interop.frameworks import Framework, framework_of
from fp8core.interop.launch_streams import LaunchStream, stream_address
from fp8core.interop.names import Operand, ScaleOperand, dtype_name, type_name
from fp8core.interop.ordering import order_after, order_before
from fp8core.interop.scalars import scalar
from fp8core.interop.tensor import Allocator, Result, TensorView
from fp8core.runtime import device
from fp8core.target import Target

__all__ = [
    "Allocator",
    "Framework",
    "LaunchStream",
    "Operand",
    "Result",
    "ScaleOperand",
    "TensorView",
    "always_writable",
    "check_writable",
    "declared",
    "dtype_name",
    "eager_only",
    "framework_of",
    "order_after",
    "order_before",
    "owner_of",
    "reinterpret",
    "scalar",
    "stream_address",
    "stream_of",
    "view",
    "wrote",
]


@eager_only
def view(x: Any, name: str, launch: LaunchStream | None = None) -> TensorView:
    """Return a view of the array ``x``; nothing is copied.

    Args:
        x: an array of NumPy, CuPy, PyTorch or JAX, a Float8Array, or anything else that offers DLPack or
            ``__cuda_array_interface__``, of a dtype in `dtypes.ITEMSIZE`. Whether it requires grad does not matter.
        name: the name of the operand in error messages.
        launch: the stream of the launch that will read the array, if it is known. Frameworks that can order an array
            only while they view it order it for that stream, and otherwise for their current one.

    Raises:
        DTypeError: x is not an array, its dtype is not in `dtypes.ITEMSIZE`, or its byte order is not the machine's.
        LayoutError: x has no strided memory of its own.
        DeviceError: x is on a device that kernels cannot be launched on.
    """
    kind: Any = type(x)
    read, takes_launch = _reader(kind)
    if read is None:
        wanted = "a number or an array" if isinstance(name, ScaleOperand) else "an array"
        if x is None:
            raise DTypeError(f"{name} needs {wanted}, got None")
        raise DTypeError(f"{name} needs {wanted} that offers DLPack, got {type_name(x)}")
    seen: TensorView = read(x, name, launch) if takes_launch else read(x, name)
    return seen


def declared(x: Any, name: str) -> tuple[str, Target]:
    """Return the dtype and the device of an array, which may be a traced tensor without memory.

    Raises:
        DTypeError, LayoutError, DeviceError: as for `view`.
    """
    framework = None if isinstance(x, Float8Array) else framework_of(type(x))
    if framework is not None:
        return framework.declared(x, name)
    seen = view(x, name)
    return seen.dtype, seen.target


def stream_of(first: TensorView, stream: Any = None) -> int:
    """Return the stream to launch on: ``stream`` if given, otherwise the current stream of the framework of ``first``.

    Args:
        first: the operand that determines the framework and the device.
        stream: an address (0 is the default stream), or an object with ``__cuda_stream__``, ``.ptr`` or
            ``.cuda_stream``.

    Returns:
        The stream's address; 0 on the host, which has none.

    Raises:
        DeviceError: ``stream`` is neither an address nor such an object; or it is the per-thread default stream, and
            the framework's allocator would share memory among those of several threads.
    """
    given = None if stream is None else stream_address(stream)
    if first.target.platform == "host":
        return 0
    if given == device.PER_THREAD and not first.framework.pools_of_threads:
        raise DeviceError(
            f"stream needs to be one stream in all threads for arrays of {first.framework.name}, whose allocator tells "
            f"streams apart by their handles, got the per-thread default stream ({given})"
        )
    chosen = first.framework.stream(first.target) if given is None else given
    if first.held is not None:
        order_before(chosen, (first,), stream)
    return chosen


@cache
def _reader(cls: type) -> tuple[Any, bool]:
    """Return the function that views arrays of a type, None if there is none, and whether it takes a `LaunchStream`."""
    if issubclass(cls, Float8Array):
        from fp8core.interop import cupy_arrays

        return cupy_arrays.view_float8, False
    framework = framework_of(cls)
    return (None, False) if framework is None else (framework.view, framework.orders_in_view)


def owner_of(x: Any) -> tuple[Any, Framework | None]:
    """Return the array that owns the memory of ``x`` (for a Float8Array that of its bytes), and its framework."""
    memory = x.codes if isinstance(x, Float8Array) else x
    return memory, framework_of(type(memory))


def check_writable(x: Any, name: str) -> None:
    """Raise LayoutError if ``x`` must not be written to."""
    memory, framework = owner_of(x)
    if framework is not None:
        framework.check_writable(memory, name)


def always_writable(x: Any) -> bool:
    """Return whether repeated calls may write to arrays with the signature of ``x`` without `check_writable`."""
    memory, framework = owner_of(x)
    return framework is None or framework.always_writable(memory)


def reinterpret(x: Any, dtype: str) -> Any:
    """Return an array of the same framework over the memory of ``x``, with the one-byte dtype ``dtype``."""
    _, framework = owner_of(x)
    assert framework is not None
    return framework.reinterpret(x, dtype)


def wrote(arrays: Iterable[Any]) -> None:
    """Tell the frameworks of ``arrays`` that these were written in place."""
    for x in arrays:
        _, framework = owner_of(x)
        if framework is not None and framework.wrote is not None:
            framework.wrote((x,))
