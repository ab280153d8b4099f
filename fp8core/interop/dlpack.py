"""DLPack in ctypes: reads a capsule, and gives a new one a dtype that its producer cannot express.

The structures are those of dlpack.h 1.0. The unversioned ones are older; JAX still exports them.
"""

import ctypes
from functools import lru_cache
from typing import Any, Final, NamedTuple

CPU: Final = 1
CUDA: Final = 2
CUDA_HOST: Final = 3
ROCM: Final = 10
ROCM_HOST: Final = 11
CUDA_MANAGED: Final = 13
DEVICES: Final[dict[int, str]] = {
    CPU: "CPU",
    CUDA: "CUDA",
    CUDA_HOST: "CUDA host",
    4: "OpenCL",
    7: "Vulkan",
    8: "Metal",
    ROCM: "ROCm",
    ROCM_HOST: "ROCm host",
    CUDA_MANAGED: "CUDA managed",
    14: "oneAPI",
}
HOST_DEVICES: Final = frozenset((CPU, CUDA_HOST, ROCM_HOST))
GPU_DEVICES: Final = frozenset((CUDA, ROCM, CUDA_MANAGED))

CODES: Final[dict[str, tuple[int, int]]] = {
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "float16": (2, 16),
    "float32": (2, 32),
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}
"""The DLPack type code and the number of bits of each dtype."""
NAMES: Final[dict[tuple[int, int], str]] = {code: name for name, code in CODES.items()}
_KINDS: Final[dict[int, str]] = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool", 17: "float4"}

READ_ONLY: Final = 1
"""The bit of a versioned tensor's flags."""


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    """DLManagedTensor, behind a capsule named "dltensor"."""

    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned, behind a capsule named "dltensor_versioned"."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


class Content(NamedTuple):
    """The fields of a tensor: strides in elements; ``dtype`` is a key of `CODES`, or the name of another dtype."""

    pointer: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device_type: int
    device_id: int
    read_only: bool


_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype, _get_name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def managed(capsule: Any) -> Managed | ManagedVersioned:
    """Return the structure in an unconsumed capsule. The capsule still owns it: keep the capsule as long as the memory.

    A capsule that nobody consumes calls its tensor's deleter once, when it is freed.

    Raises:
        BufferError: the capsule has an unknown major version, or was consumed.
    """
    name = _get_name(capsule)
    if name == b"dltensor":
        return Managed.from_address(_address(capsule, name))
    if name == b"dltensor_versioned":
        versioned = ManagedVersioned.from_address(_address(capsule, name))
        if versioned.major != 1:
            raise BufferError(f"DLPack {versioned.major}.{versioned.minor} is not supported, 1.x and older are")
        return versioned
    raise BufferError(f"a DLPack capsule is needed, got one named {name!r}")


def _address(capsule: Any, name: bytes) -> int:
    address: int = _get_pointer(capsule, name)
    return address


def content(tensor: Tensor, *, read_only: bool = False) -> Content:
    """Return the fields of ``tensor``; if it has no strides, those of a contiguous array.

    Raises:
        BufferError: the tensor has no shape, or one with a negative extent.
    """
    ndim = tensor.ndim
    if ndim < 0 or (ndim and not tensor.shape):
        raise BufferError(f"a shape is needed, got none for {ndim} axes")
    shape = tuple(tensor.shape[:ndim]) if ndim else ()
    check_extents(shape)
    strides = tuple(tensor.strides[:ndim]) if tensor.strides else contiguous(shape)
    dtype = NAMES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        dtype = _KINDS.get(tensor.code, f"type code {tensor.code} of bits ") + str(tensor.bits)
        dtype += f" x {tensor.lanes}" if tensor.lanes != 1 else ""
    pointer = (tensor.data or 0) + tensor.byte_offset
    return Content(pointer, dtype, shape, strides, tensor.device_type, tensor.device_id, read_only)


def check_extents(shape: tuple[int, ...]) -> None:
    """Refuse an exporter's negative extents.

    Raises:
        BufferError: there is one.
    """
    if any(extent < 0 for extent in shape):
        raise BufferError(f"extents of at least 0 are needed, got shape {shape}")


def read(capsule: Any) -> Content:
    """Return the fields of the tensor in an unconsumed capsule."""
    held = managed(capsule)
    return content(held.tensor, read_only=isinstance(held, ManagedVersioned) and bool(held.flags & READ_ONLY))


def retag(capsule: Any, dtype: str) -> Any:
    """Return ``capsule``, new and of unsigned integers, with its dtype changed in place to ``dtype`` of equal width."""
    tensor = managed(capsule).tensor
    code, bits = CODES[dtype]
    if tensor.bits != bits:
        raise BufferError(f"{tensor.bits} bits cannot be called {dtype}")
    tensor.code = code
    return capsule


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major array; its extents may be symbols of a tracer."""
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= max(extent, 1)
    return tuple(reversed(strides))


contiguous: Final = lru_cache(4096)(row_major)
"""`row_major` with a cache, for extents that are numbers."""
