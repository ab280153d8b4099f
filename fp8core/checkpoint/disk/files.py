"""Reads and writes safetensors files by offset."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray

from fp8core.errors import CheckpointError
from fp8core.runtime.regular_files import open_regular

FLOATS: Final[Mapping[str, np.dtype[Any]]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes that can be quantized, by their names in safetensors."""
FP8: Final[Mapping[str, str]] = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""By safetensors' name: the name of an FP8 dtype in fp8core."""
DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    **FLOATS,
    **{name: np.dtype(getattr(ml_dtypes, dtype)) for name, dtype in FP8.items()},
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    **{f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (1, 2, 4, 8)},
    "C64": np.dtype(np.complex64),
    "BOOL": np.dtype(np.bool_),
}
"""By safetensors' name: the dtype in NumPy or ml_dtypes."""
AT_ONCE: Final = 1 << 25
"""The bytes of a tensor that are in memory at a time, unless the rows of one block are more."""
LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"
"""The beginning of the text that Git LFS has in place of a file that it has not downloaded."""
ROWS: Final = 128
"""Rows are read in multiples of this number, the height of a 128x128 block."""


class Entry(NamedTuple):
    """A tensor in a file; ``begin`` is its offset from the start of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    pitch: int = 0
    """For a matrix whose transpose is stored: the number of elements from a column to the next. 0 for stored rows."""


class Header(NamedTuple):
    """The header of a safetensors file."""

    path: Path
    metadata: dict[str, str]
    entries: dict[str, Entry]
    state: tuple[int, int]
    """The state of the file when the header was read (`state_of`)."""

    def refuse_changed(self) -> None:
        """Refuse a file that has changed since its header was read.

        A file that is gone is no error here: either its data was read before, or reading fails anyway.

        Raises:
            CheckpointError: the file was written or replaced.
        """
        with suppress(FileNotFoundError):
            refuse_another(self.path, state_of(self.path.stat()), self.state)


class Piece(NamedTuple):
    """A tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_header(path: Path) -> Header:
    """Return the header of a safetensors file.

    Raises:
        CheckpointError: the file cannot be read, is not a safetensors file, or is shorter or longer than it says.
    """
    try:
        # Python opens the file first, as the library reports every failure to open as a missing file.
        with os.fdopen(open_regular(path), "rb") as file:
            state = state_of(os.fstat(file.fileno()))
            start = file.read(len(LFS_POINTER))
            size = int.from_bytes(start[:8], "little")
            # The library checks the header, the offsets and the length of the file, but does not expose the offsets.
            with safetensors.safe_open(path, framework="numpy"):
                pass
            file.seek(8)
            described = json.loads(file.read(size))
    except safetensors.SafetensorError as error:
        reason = "it is a pointer of Git LFS: git lfs pull downloads the file" if start == LFS_POINTER else error
        raise CheckpointError(f"{path} is not a complete safetensors file: {reason}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    metadata = described.pop("__metadata__", None) or {}
    entries: dict[str, Entry] = {}
    for name, tensor in described.items():
        begin, end = tensor["data_offsets"]
        entries[name] = Entry(name, tensor["dtype"], tuple(tensor["shape"]), 8 + size + begin, end - begin)
    return Header(path, metadata, entries, state)


def state_of(found: os.stat_result) -> tuple[int, int]:
    """Return a file's length in bytes and time of last modification in ns, which change if the file is written."""
    return found.st_size, found.st_mtime_ns


def refuse_another(path: Path, now: tuple[int, int], opened: tuple[int, int]) -> None:
    """Refuse a file that has changed since its header was read, so that the header's offsets may be wrong.

    Raises:
        CheckpointError: ``now`` differs from ``opened``, the state when the header was read.
    """
    if now != opened:
        raise CheckpointError(f"cannot read {path}: it was written since it was opened")


def read_rows(
    file: BinaryIO, entry: Entry, multiple: int = ROWS, itemsize: int | None = None
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield a matrix some rows at a time, as `stored_rows` does, but float64 as float32.

    Numbers beyond the range of float32 become infinite.
    """
    for first, stored in stored_rows(file, entry, multiple, itemsize):
        if stored.dtype.itemsize > 4:
            with np.errstate(over="ignore"):
                yield first, stored.astype(np.float32)
        else:
            yield first, stored


def stored_rows(
    file: BinaryIO, entry: Entry, multiple: int = ROWS, itemsize: int | None = None
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield a matrix some rows at a time: the index of the first row, and the rows, in a dtype of `DTYPES`.

    All pieces but the last have a multiple of ``multiple`` rows: as many as fit in `AT_ONCE` bytes, with ``itemsize``
    bytes per element (default: as stored), but at least ``multiple``.
    """
    size = itemsize or DTYPES[entry.dtype].itemsize
    step = max(AT_ONCE // (entry.shape[1] * size) // multiple, 1) * multiple
    yield from _pieces(file, entry, step)


def copy_tensor(source: BinaryIO, entry: Entry, target: BinaryIO, begin: int) -> Iterator[int]:
    """Copy a tensor's data from file to file, some megabytes at a time, and yield the bytes of each part."""
    if entry.pitch:
        of_a_row = entry.nbytes // entry.shape[0]
        for first, rows in _pieces(source, entry, max(AT_ONCE // of_a_row, 1)):
            target.seek(begin + first * of_a_row)
            target.write(rows.view(np.uint8).data)
            yield rows.nbytes
        return
    buffer = memoryview(bytearray(min(entry.nbytes, AT_ONCE)))
    for done in range(0, entry.nbytes, AT_ONCE):
        chunk = buffer[: entry.nbytes - done]
        _read_into(source, entry, entry.begin + done, chunk)
        target.seek(begin + done)
        target.write(chunk)
        yield chunk.nbytes


def _pieces(file: BinaryIO, entry: Entry, step: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield a matrix ``step`` rows at a time; if its transpose is stored, these are columns in the file."""
    rows, cols = entry.shape
    dtype = DTYPES[entry.dtype]
    for first in range(0, rows, step):
        count = min(step, rows - first)
        if not entry.pitch:
            values: NDArray[Any] = np.empty((count, cols), dtype)
            begin = entry.begin + first * cols * dtype.itemsize
            _read_into(file, entry, begin, values.view(np.uint8).data.cast("B"))
        else:
            stored: NDArray[Any] = np.empty((cols, count), dtype)
            for col in range(cols):
                begin = entry.begin + (col * entry.pitch + first) * dtype.itemsize
                _read_into(file, entry, begin, stored[col].view(np.uint8).data)
            values = np.ascontiguousarray(stored.T)
        yield first, values


def _read_into(file: BinaryIO, entry: Entry, begin: int, buffer: memoryview) -> None:
    try:
        file.seek(begin)
        read = file.readinto(buffer)  # type: ignore[attr-defined]
    except OSError as error:
        raise CheckpointError(f"cannot read {entry.name} of {file.name}: {error.strerror or error}") from error
    if read != buffer.nbytes:
        raise CheckpointError(f"{file.name} ended inside {entry.name}: it became shorter while it was read")


def lay_out(pieces: Iterable[Piece], metadata: dict[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Return a file's first bytes, the offset of each tensor in the file, and the file's length.

    Tensors with larger items come first, as in the safetensors library, so that each tensor is aligned to its items.
    """

    def order(piece: Piece) -> tuple[int, str]:
        items = math.prod(piece.shape)
        return (-(piece.nbytes // items) if items else 0, piece.name)

    described: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    begins: dict[str, int] = {}
    end = 0
    for piece in sorted(pieces, key=order):
        begins[piece.name] = end
        offsets = [end, end + piece.nbytes]
        described[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": offsets}
        end += piece.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + begin for name, begin in begins.items()}, start + end
