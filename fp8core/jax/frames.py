"""Reads and answers XLA's call frames in Python: the structures of ``xla/ffi/api/c_api.h``, version 0.1 and later.

A handler is a C function that takes the address of a call frame. Reading the frame with `struct` over one view of all
memory takes a third of the time that `ctypes` structures take.

Every structure begins with its size and the address of an extension. Within a major version, fields are only added at
the end of a structure. If the major version is another one, `answered` does not answer, and XLA refuses the handler.
"""

import ctypes
from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from fp8core.errors import BackendError

MEMORY: Final = memoryview((ctypes.c_ubyte * (2**63 - 1)).from_address(0)).cast("B")
"""The whole address space; only known addresses are read and written through it."""

HANDLER: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
MAJOR: Final = 0
"""The major version of the interface that this module implements."""
METADATA: Final = 1
"""The type of the extension by which XLA asks a handler for its version and its traits."""
COMMAND_BUFFERS: Final = 1
"""The trait of a handler whose launches XLA may record: they depend on the attributes only."""
INVALID_ARGUMENT, INTERNAL = 3, 13
"""XLA's error codes."""

_WORD: Final = Struct("Q").unpack_from
_VERSION: Final = Struct("ii").unpack_from
_FRAME: Final = Struct("8xQQQi4x16xQ8xQ16xQ8xQ40xQ").unpack_from
_SIZES: Final = Struct("Q32xQ32xQ32xQ").unpack_from
_EXPECTED: Final = (168, 40, 40, 48)
"""The least size of a frame, and the exact sizes of its arguments, results and attributes, in bytes."""
_SPAN: Final = Struct("QQ").unpack_from
_EXTENSION: Final = Struct("8xi4x8xQ").unpack_from
_ANSWER: Final = Struct("iiI").pack_into
_DATA: Final = 24
"""The offset of the address in a buffer structure."""
_DIMS: Final = Struct("QQ").unpack_from
_DIMS_AT: Final = 32
_API_VERSION, _ERROR_CREATE, _ERROR_DESTROY, _STREAM_GET, _ORDINAL_GET = 32, 48, 64, 80, 184
"""Offsets of the version and of functions in the api structure."""
_METADATA_VERSION: Final = 24
_ADDRESSES: Final = [Struct(f"{count}Q").unpack_from for count in range(17)]
"""By count: the reader of so many addresses in a row."""

_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_functions: Final = dict[int, Callable[[int], Any]]()


def read(frame: int) -> tuple[int, ...]:
    """Return the fields of a call frame; structures are given by their addresses.

    The fields are: extension, api, context, stage, number of arguments, arguments, number of results, results,
    attributes.
    """
    return _FRAME(MEMORY, frame)


def check(frame: int) -> None:
    """Refuse a call frame whose structures do not have the sizes that this module expects.

    Raises:
        BackendError: this XLA has another interface.
    """
    whole, *parts = _SIZES(MEMORY, frame)
    if whole < _EXPECTED[0] or tuple(parts) != _EXPECTED[1:]:
        raise BackendError(f"XLA's call frames need structures of {_EXPECTED} bytes, got {(whole, *parts)}")


def text(attributes: int) -> bytes:
    """Return the first attribute of a frame, which is a string."""
    at, size = _SPAN(MEMORY, _WORD(MEMORY, attributes)[0])
    return ctypes.string_at(at, size)


def addresses(count: int, buffers: int) -> list[int]:
    """Return the addresses of ``count`` buffers, given an array of pointers to their structures."""
    memory, word = MEMORY, _WORD
    return [word(memory, at + _DATA)[0] for at in _ADDRESSES[count](memory, buffers)]


def shapes(count: int, buffers: int) -> list[tuple[int, ...]]:
    """Return the shapes of ``count`` buffers, given an array of pointers to their structures."""
    found = []
    for at in _ADDRESSES[count](MEMORY, buffers):
        rank, dims = _DIMS(MEMORY, at + _DIMS_AT)
        found.append(_ADDRESSES[rank](MEMORY, dims))
    return found


def answered(extension: int, api: int, traits: int) -> bool:
    """Return whether the extension asks for a handler's metadata; if so, write the version and the traits into it.

    The version is XLA's own. If its major number is not `MAJOR`, nothing is written, and XLA refuses the handler.
    """
    kind, metadata = _EXTENSION(MEMORY, extension)
    if kind != METADATA:
        return False
    major, minor = _VERSION(MEMORY, api + _API_VERSION)
    if major == MAJOR:
        _ANSWER(MEMORY, metadata + _METADATA_VERSION, major, minor, traits)
    return True


def _function(api: int, at: int) -> Callable[[int], Any]:
    address = _WORD(MEMORY, api + at)[0]
    known = _functions.get(address)
    if known is None:
        known = _functions[address] = _Function(address)
    return known


def error(api: int, message: str, code: int) -> int:
    """Return a new error for XLA, which takes ownership of it."""
    kept = ctypes.create_string_buffer(message.encode())
    arguments = ctypes.create_string_buffer(Struct("QQQi4x").pack(28, 0, ctypes.addressof(kept), code))
    made: int = _function(api, _ERROR_CREATE)(ctypes.addressof(arguments))
    return made


def stream(api: int, context: int) -> int:
    """Return the stream of a call.

    Raises:
        BackendError: XLA returns an error.
    """
    return _asked(api, _STREAM_GET, context, 32)


def ordinal(api: int, context: int) -> int:
    """Return the number of the device of a call.

    Raises:
        BackendError: XLA returns an error.
    """
    return _asked(api, _ORDINAL_GET, context, 28) & 0xFFFFFFFF


_ASK: Final = Struct("QQQQ")


def _asked(api: int, at: int, context: int, size: int) -> int:
    arguments = ctypes.create_string_buffer(_ASK.pack(size, 0, context, 0), _ASK.size)
    failed = _function(api, at)(ctypes.addressof(arguments))
    if failed:
        taken = ctypes.create_string_buffer(_ASK.pack(24, 0, failed, 0))  # a variable keeps it alive during the call
        _function(api, _ERROR_DESTROY)(ctypes.addressof(taken))
        raise BackendError("XLA needs to know the stream and the device of a call, got an error")
    return int(_WORD(arguments, 24)[0])
