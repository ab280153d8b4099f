"""Frameworks that offer ``__dlpack_c_exchange_api__``: C functions that read arrays, allocate them and return streams.

The table of functions is DLPackExchangeAPI of dlpack.h 1.2; all of its functions must be called with the GIL held.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any, Final

from fp8core.errors import BackendError, LayoutError
from fp8core.interop import dlpack
from fp8core.interop.dlpack_views import EXPORTER, WRITABLE_EXPORTER, target_of, view_of
from fp8core.interop.frameworks import Framework, only_instance
from fp8core.interop.names import exported
from fp8core.interop.tensor import Result, TensorView, refused_gaps
from fp8core.target import HOST, Target

_CAPSULE: Final = b"dlpack_exchange_api"
_SET_ERROR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
_ALLOCATE = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(dlpack.Tensor), ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, _SET_ERROR
)
_FROM_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
_TO_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_READ = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(dlpack.Tensor))
_STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
_DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _Api(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


def is_offered(cls: type) -> bool:
    """Return whether a type offers the table: a type may set the attribute to None, or have a property of that name."""
    is_valid: Any = ctypes.pythonapi.PyCapsule_IsValid
    return bool(is_valid(ctypes.py_object(getattr(cls, "__dlpack_c_exchange_api__", None)), _CAPSULE))


class Exchange(Framework):
    """The framework of one array type, named after the package that defines the type."""

    allows_gaps = False

    def __init__(self, cls: type) -> None:
        self.name = cls.__module__.partition(".")[0]
        get_pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
        self._capsule = cls.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
        api = _Api.from_address(get_pointer(self._capsule, _CAPSULE))
        while api.major > 1:
            if not api.previous:
                raise BackendError(f"{self.name} offers DLPack's exchange table {api.major}.{api.minor}, 1.x is needed")
            api = _Api.from_address(api.previous)
        self._allocate = _ALLOCATE(api.allocate)
        self._from_object = _FROM_OBJECT(api.from_object)
        self._to_object = _TO_OBJECT(api.to_object)
        self._read = _READ(api.read) if api.read else None
        self._current_stream = _STREAM(api.stream)

    @property
    def allocates(self) -> bool:
        """Whether the table can allocate arrays; that of cuda.core's views cannot, nor have these a stream."""
        try:
            self.empty((0,), "uint8", HOST)
        except (NotImplementedError, BackendError, BufferError):
            return False
        return True

    def view(self, x: Any, name: str) -> TensorView:
        """Return a view of ``x``; nothing is copied, and no stream waits."""
        with exported(x, name, EXPORTER):
            found, held = self._content(x)
        target = target_of(found.device_type, found.device_id, name)
        return view_of(found, target, self, x, name, held)

    def check_writable(self, x: Any, name: str) -> None:
        """Raise LayoutError if ``x`` is marked read-only: only managed tensors have flags. No stream waits."""
        with exported(x, name, WRITABLE_EXPORTER):
            read_only = _Held(self._from_object, x).managed.flags & dlpack.READ_ONLY
        if read_only:
            raise LayoutError(f"{name} needs to be writable, got a read-only {type(x).__name__}")

    def _content(self, x: Any) -> tuple[dlpack.Content, object]:
        if self._read is not None:
            tensor = dlpack.Tensor()
            _succeeded(self._read(x, ctypes.byref(tensor)), "dltensor_from_py_object")
            return dlpack.content(tensor), None
        held = _Held(self._from_object, x)
        return dlpack.content(held.managed.tensor), held

    def stream(self, target: Target) -> int:
        """Return the framework's current stream on the device of ``target``."""
        if target.platform == "host":
            return 0
        stream = ctypes.c_void_p()
        _succeeded(self._current_stream(_kind(target), target.device, ctypes.byref(stream)), "current_work_stream")
        return stream.value or 0

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: str,
        target: Target,
        strides: tuple[int, ...] | None = None,
        stream: int | None = None,
    ) -> Result:
        """Return an array from the framework's own allocator, for its current stream."""
        if stream is not None and stream != self.stream(target):
            wanted = f"to be the current one of {self.name}, which allocates for no other, or out="
            raise LayoutError(f"stream needs {wanted}, got {stream:#x}")
        order = _order_of(shape, strides)
        if order is None:
            raise refused_gaps(self.name, shape, strides or ())
        code, bits = dlpack.CODES[dtype]
        extents = (ctypes.c_int64 * len(shape))(*(shape[axis] for axis in order))
        prototype = dlpack.Tensor(None, _kind(target), target.device, len(shape), code, bits, 1, extents, None, 0)
        made = ctypes.c_void_p()
        errors: list[str] = []

        def tell(context: int, kind: bytes, message: bytes) -> None:
            del context
            errors.append(f"{kind.decode()}: {message.decode()}")

        status = self._allocate(ctypes.byref(prototype), ctypes.byref(made), None, _SET_ERROR(tell))
        if status or not made.value:
            raise BackendError(f"{self.name} cannot allocate {shape} of {dtype} on {target}: {'; '.join(errors)}")
        managed = dlpack.ManagedVersioned.from_address(made.value)
        tensor = managed.tensor
        _permute(tensor, order)
        pointer = (tensor.data or 0) + tensor.byte_offset
        array = ctypes.c_void_p()
        try:
            _succeeded(self._to_object(made, ctypes.byref(array)), "managed_tensor_to_py_object")
        except BaseException:
            _delete(managed, made.value)
            raise
        return Result(pointer, _taken(array))


class _Held:
    """A managed tensor of the exchange table; calls its deleter once, when it is freed."""

    _address = 0

    def __init__(self, from_object: Callable[..., int], x: Any) -> None:
        address = ctypes.c_void_p()
        _succeeded(from_object(x, ctypes.byref(address)), "managed_tensor_from_py_object")
        if not address.value:
            raise BufferError("managed_tensor_from_py_object gave no tensor")
        self._address = address.value
        self.managed = dlpack.ManagedVersioned.from_address(self._address)

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:  # names of modules may be gone then
        if self._address and not exiting():
            _delete(self.managed, self._address)


def _delete(managed: dlpack.ManagedVersioned, address: int) -> None:
    if managed.deleter:
        _DELETER(managed.deleter)(address)


def _succeeded(status: int, call: str) -> None:
    if status:
        raise BufferError(f"{call} failed with {status}")


def _taken(reference: ctypes.c_void_p) -> Any:
    """Return the object of a new (owned) reference, and drop that reference: the returned object holds another."""
    taken = ctypes.cast(reference, ctypes.py_object).value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(taken))
    return taken


def _kind(target: Target) -> int:
    return {"host": dlpack.CPU, "cuda": dlpack.CUDA, "hip": dlpack.ROCM}[target.platform]


def _order_of(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the axes from slowest to fastest; a row-major array with its axes in that order has ``strides``.

    None if there is no such order, as an array with these strides has gaps.
    """
    axes = range(len(shape))
    if strides is None:
        return tuple(axes)
    order = tuple(sorted(axes, key=lambda axis: (-strides[axis], axis)))
    row_major = dlpack.contiguous(tuple(shape[axis] for axis in order))
    gaps = any(shape[axis] > 1 and strides[axis] != step for axis, step in zip(order, row_major, strict=True))
    return None if gaps else order


def _permute(tensor: dlpack.Tensor, order: tuple[int, ...]) -> None:
    extents, steps = tensor.shape[: tensor.ndim], tensor.strides[: tensor.ndim]
    for position, axis in enumerate(order):
        tensor.shape[axis], tensor.strides[axis] = extents[position], steps[position]


@only_instance
def framework(cls: type) -> Exchange:
    """Return the framework of the arrays of type ``cls``."""
    return Exchange(cls)
