"""XLA's call frames, read and answered in Python: the structures of ``xla/ffi/api/c_api.h``, version 0.1 and later.

A handler is a C function that takes the address of a call frame. Reading the frame with `struct` over one view of all
memory takes a third of the time that structures of `ctypes` take.

Every structure begins with its size and the address of an extension. Fields are added at the end of structures alone,
unless the major version changes. So versions of another major number are not answered, and XLA refuses the handler.
"""

import ctypes
from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from fp8core.errors import BackendError

MEMORY: Final = memoryview((ctypes.c_ubyte * (2**63 - 1)).from_address(0)).cast("B")
"""All memory, to be read and written where something is known to be."""

HANDLER: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
MAJOR: Final = 0
"""The major version of the interface in which all of this is as written here."""
METADATA: Final = 1
"""The type of the extension by which XLA asks a handler for its version and its traits."""
COMMAND_BUFFERS: Final = 1
"""The trait of a handler whose launches may be recorded: they are the same whenever the attributes are."""
INVALID_ARGUMENT, INTERNAL = 3, 13
"""Codes of errors."""

_WORD: Final = Struct("Q").unpack_from
_VERSION: Final = Struct("ii").unpack_from
_FRAME: Final = Struct("8xQQQi4x16xQ8xQ16xQ8xQ40xQ").unpack_from
_SIZES: Final = Struct("Q32xQ32xQ32xQ").unpack_from
_EXPECTED: Final = (168, 40, 40, 48)
"""The sizes of a frame at least, and within it of arguments, results and attributes."""
_SPAN: Final = Struct("QQ").unpack_from
_EXTENSION: Final = Struct("8xi4x8xQ").unpack_from
_ANSWER: Final = Struct("iiI").pack_into
_DATA: Final = 24
"""Where the address is in a buffer."""
_DIMS: Final = Struct("QQ").unpack_from
_DIMS_AT: Final = 32
_API_VERSION, _ERROR_CREATE, _ERROR_DESTROY, _STREAM_GET, _ORDINAL_GET = 32, 48, 64, 80, 184
"""Where the version and the functions are in the api."""
_METADATA_VERSION: Final = 24
_ADDRESSES: Final = [Struct(f"{count}Q").unpack_from for count in range(17)]
"""Of so many addresses in a row."""

_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_functions: Final = dict[int, Callable[[int], Any]]()


def read(frame: int) -> tuple[int, ...]:
    """Return what a call frame says, where structures lie by their addresses.

    That is the extension, the api, the context and the stage; the number of arguments and where they are, the same of
    results; and where the attributes are.
    """
    return _FRAME(MEMORY, frame)


def check(frame: int) -> None:
    """Refuse a call frame whose structures have other sizes than those that are read here.

    Raises:
        BackendError: this XLA has another interface.
    """
    whole, *parts = _SIZES(MEMORY, frame)
    if whole < _EXPECTED[0] or tuple(parts) != _EXPECTED[1:]:
        raise BackendError(f"XLA's call frames need structures of {_EXPECTED} bytes, got {(whole, *parts)}")


def text(attributes: int) -> bytes:
    """Return the first attribute of a frame, which is a text."""
    at, size = _SPAN(MEMORY, _WORD(MEMORY, attributes)[0])
    return ctypes.string_at(at, size)


def addresses(count: int, buffers: int) -> list[int]:
    """Return where the buffers lie whose structures an array points to."""
    memory, word = MEMORY, _WORD
    return [word(memory, at + _DATA)[0] for at in _ADDRESSES[count](memory, buffers)]


def shapes(count: int, buffers: int) -> list[tuple[int, ...]]:
    """Return the extents of buffers."""
    found = []
    for at in _ADDRESSES[count](MEMORY, buffers):
        rank, dims = _DIMS(MEMORY, at + _DIMS_AT)
        found.append(_ADDRESSES[rank](MEMORY, dims))
    return found


def answered(extension: int, api: int, traits: int) -> bool:
    """Tell XLA of which version a handler is, and its traits, if that is what the extension asks for.

    The version is XLA's own, unless it has a major number that is not known here: then there is no answer.
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
    """Return an error for XLA, which takes it over."""
    kept = ctypes.create_string_buffer(message.encode())
    arguments = ctypes.create_string_buffer(Struct("QQQi4x").pack(28, 0, ctypes.addressof(kept), code))
    made: int = _function(api, _ERROR_CREATE)(ctypes.addressof(arguments))
    return made


def stream(api: int, context: int) -> int:
    """Return the stream of a call.

    Raises:
        BackendError: XLA says that there is none.
    """
    return _asked(api, _STREAM_GET, context, 32)


def ordinal(api: int, context: int) -> int:
    """Return the number of the device of a call.

    Raises:
        BackendError: XLA says that there is none.
    """
    return _asked(api, _ORDINAL_GET, context, 28) & 0xFFFFFFFF


_ASK: Final = Struct("QQQQ")


def _asked(api: int, at: int, context: int, size: int) -> int:
    arguments = ctypes.create_string_buffer(_ASK.pack(size, 0, context, 0), _ASK.size)
    failed = _function(api, at)(ctypes.addressof(arguments))
    if failed:
        taken = ctypes.create_string_buffer(_ASK.pack(24, 0, failed, 0))  # named, for it has to outlive the call
        _function(api, _ERROR_DESTROY)(ctypes.addressof(taken))
        raise BackendError("XLA needs to know the stream and the device of a call, got an error")
    return int(_WORD(arguments, 24)[0])
