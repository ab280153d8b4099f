"""Array interop: arrays of any framework in, as views that kernels can use, and results of the same framework out.

Nothing is copied in either direction, and no framework is imported: one is found in `sys.modules` when an array
of its arrives.
"""

from functools import cache
from typing import Any

from fp8core.errors import DeviceError, DTypeError
from fp8core.interop.float8 import Float8Array
from fp8core.interop.frameworks import framework_of
from fp8core.interop.names import dtype_name
from fp8core.interop.tensor import Allocator, Framework, Result, TensorView

__all__ = [
    "Allocator",
    "Framework",
    "Result",
    "TensorView",
    "dtype_name",
    "framework_of",
    "stream_of",
    "view",
]


def view(x: Any, name: str, *, written: bool = False) -> TensorView:
    """Return a view of the array ``x``; nothing is copied.

    Args:
        x: an array of NumPy, CuPy, PyTorch or JAX, a Float8Array, or anything else that offers DLPack, of a
            dtype in `problem.ITEMSIZE`. Whether it requires grad does not matter.
        name: what errors call the operand.
        written: the operand is a destination.

    Raises:
        DTypeError: it is no array, or its dtype is none of ours or not in the machine's byte order.
        LayoutError: it has no strided memory of its own, or is a destination and cannot be written to.
        DeviceError: it lies on a device that kernels cannot be launched on.
    """
    kind: Any = type(x)
    read = _reader(kind)
    if read is None:
        raise DTypeError(f"{name} must be an array that offers DLPack, got {kind.__module__}.{kind.__qualname__}")
    seen: TensorView = read(x, name)
    if written:
        seen.framework.written(_storage_of(x), name)
    return seen


def stream_of(first: TensorView, stream: Any = None, *others: TensorView) -> int:
    """Return the stream to launch on: ``stream`` if given, else the one that the framework of ``first`` works on.

    Args:
        first: the operand whose framework decides, and whose device it is.
        stream: an address (0 is the default stream), or an object with ``__cuda_stream__``, ``.ptr`` or
            ``.cuda_stream``.
        others: the other operands. Where one is of another framework, the stream is made to wait for what that
            one's current stream still does; arrays of JAX are made ready for the stream.

    Returns:
        The stream's address; 0 on the host.

    Raises:
        DeviceError: ``stream`` is nothing of that kind.
    """
    framework, target = first.framework, first.target
    if target.platform == "host":
        return 0
    if stream is None:
        chosen = framework.stream(target)
    else:
        chosen = _address(stream)
        if first.held is not None:
            framework.order(first, chosen, stream)
    for other in others:
        if other.framework is not framework or other.held is not None:
            other.framework.order(other, chosen, stream)
    return chosen


def _address(stream: Any) -> int:
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream < 0:
            raise DeviceError(f"stream must be an address, 0 or more, got {stream}")
        return stream
    offer = getattr(stream, "__cuda_stream__", None)
    if offer is not None:
        return int((offer() if callable(offer) else offer)[1])
    for attribute in ("ptr", "cuda_stream"):
        address = getattr(stream, attribute, None)
        if isinstance(address, int):
            return address
    raise DeviceError(
        "stream must be an address or an object with __cuda_stream__, .ptr or .cuda_stream, "
        f"got {type(stream).__name__}"
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


# ---- temporary until the interop branch is merged


def scalar(x):
    import numpy as np

    if isinstance(x, bool | np.bool_):
        return None
    if isinstance(x, int | float | np.integer | np.floating):
        return float(x)
    return None


def eager_only(f):
    f._torchdynamo_disable = True
    return f


def wrote(arrays, places):
    for at in places:
        x = arrays[at]
        if type(x).__module__.startswith("torch"):
            import sys

            if not x.is_inference():
                sys.modules["torch"]._C._increment_version((x,))


def order_before(stream, views, explicit):
    first = views[0]
    if first.target.platform != "host":
        stream_of(first, explicit, *views[1:])


def order_after(stream, views, explicit):
    pass


def _number(self, value, target, stream=None):
    import numpy as np

    made = self.empty((1,), "float32", target, None, stream)
    assert target.platform == "host"
    import ctypes

    ctypes.c_float.from_address(made.pointer).value = value
    return made


Framework.number = _number
