"""Tensor maps (CUtensorMap) of the operands that TMA loads: made when an address is first seen, shared by all plans.

A map holds an address and a geometry, so plans with the same geometry share maps. The process keeps up to `MOST_MAPS`.
"""

import ctypes
import threading
from typing import ClassVar, Final
from weakref import WeakValueDictionary

from fp8core.kernels.encodings import round_up
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K
from fp8core.runtime import device

MOST_MAPS: Final = 8192
"""Maps that the process keeps, some 300 bytes each with its entry: past so many, all are dropped and made again."""

SWIZZLE: Final = {32: 1, 64: 2, 128: 3}
"""CUtensorMapSwizzle by the bytes of a box's row."""
_SHARED: Final[WeakValueDictionary[tuple[object, ...], "TensorMaps"]] = WeakValueDictionary()
_LOCK: Final = threading.RLock()  # reentrant: a garbage collection while it is held may come back here
"""Guards `_SHARED` and additions to the maps in it; a hit takes no lock."""


class TensorMaps(dict[int, bytes]):
    """Tensor maps of row-major bytes with one geometry, by address: a hit is a dictionary look-up."""

    __slots__ = ("__weakref__", "_geometry")
    made: ClassVar[int] = 0
    """Maps made since all were last cleared: at least as many as are kept."""

    def __init__(self, rows: int, columns: int, stride: int, box_rows: int, box_columns: int) -> None:
        super().__init__()
        self._geometry = (rows, columns, stride, box_rows, box_columns)

    def __missing__(self, pointer: int) -> bytes:
        """Make and keep the map of the tensor at ``pointer``."""
        found = self.make(pointer)
        with _LOCK:
            if TensorMaps.made >= MOST_MAPS:
                for maps in list(_SHARED.values()):
                    maps.clear()
                TensorMaps.made = 0
            TensorMaps.made += 1
            self[pointer] = found
        return found

    def make(self, pointer: int) -> bytes:
        """Return the map of the tensor at ``pointer``."""
        return encode(pointer, *self._geometry)


class WordMaps(TensorMaps):
    """The same for 32-bit words: columns and boxes are in words, strides in bytes."""

    __slots__ = ()

    def make(self, pointer: int) -> bytes:
        """Return the map of the words at ``pointer``."""
        return encode(pointer, *self._geometry, item=4)


def tensor_maps(rows: int, columns: int, stride: int, box_rows: int, box_columns: int = BLOCK_K) -> TensorMaps:
    """Return the maps of uint8 ``[rows, columns]`` as `encode` makes them: one shared dictionary per geometry."""
    return shared_maps(TensorMaps, rows, columns, stride, box_rows, box_columns)


def shared_maps(kind: type[TensorMaps], *geometry: int) -> TensorMaps:
    """Return the maps of a kind and a geometry."""
    with _LOCK:
        found = _SHARED.get((kind, *geometry))
        if found is None:
            found = _SHARED[(kind, *geometry)] = kind(*geometry)
        return found


def encode(
    pointer: int, rows: int, columns: int, stride: int, box_rows: int, box_columns: int = BLOCK_K, item: int = 1
) -> bytes:
    """Return the tensor map of ``[rows, columns]`` items of 1 byte (or 4) in boxes of ``box_rows`` x ``box_columns``.

    A box of bytes whose rows have 32, 64 or 128 bytes is swizzled by that number; other boxes, and boxes of words, are
    not. Elements of a box outside the tensor are loaded as zeros and not stored. ``stride``, the distance of rows in
    bytes, and the address are multiples of 16.

    Raises:
        BackendError: the driver refuses the map; the message has its status and the geometry.
    """
    memory = ctypes.create_string_buffer(128 + 64)
    address = round_up(ctypes.addressof(memory), 64)
    uint64, uint32 = ctypes.c_uint64, ctypes.c_uint32
    dtype = {1: 0, 4: 2}[item]  # uint8 and uint32
    no_interleave, promote_128, zeros = 0, 2, 0  # promoting to 256 is 3 % slower
    arguments = (
        ctypes.c_void_p(address),
        dtype,
        2,
        ctypes.c_void_p(pointer),
        (uint64 * 2)(columns, rows),
        (uint64 * 1)(stride),
        (uint32 * 2)(box_columns, box_rows),
        (uint32 * 2)(1, 1),
        no_interleave,
        SWIZZLE.get(box_columns, 0) if item == 1 else 0,
        promote_128,
        zeros,
    )
    encoder = device.driver().cuTensorMapEncodeTiled
    status = encoder(*arguments)
    if status:
        status = device.retry_with_context(status, device.current(), encoder, *arguments)
    device.check(status, "cuTensorMapEncodeTiled", f"uint{8 * item} [{rows}, {columns}] with rows {stride} apart")
    return ctypes.string_at(address, 128)
