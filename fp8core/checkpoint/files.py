"""Safetensors files, read by offset and written by offset, and files that appear whole or not at all."""

import ctypes
import errno
import json
import math
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np
import safetensors
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from fp8core.errors import CheckpointError

WIDE: Final = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(bfloat16)}
"""The dtypes that can be quantized, under the names that safetensors gives them."""
COPIED_AT_ONCE: Final = 1 << 24
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
"""Of Linux: <fcntl.h> and <linux/fs.h>."""


class Entry(NamedTuple):
    """A tensor of a file: ``begin`` counts from the start of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class Header(NamedTuple):
    """What a safetensors file says of itself."""

    path: Path
    metadata: dict[str, str]
    entries: dict[str, Entry]


class Piece(NamedTuple):
    """A tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_header(path: Path) -> Header:
    """Return the header of a safetensors file.

    Raises:
        CheckpointError: the file cannot be read, is no safetensors file, or is shorter or longer than it says.
    """
    try:
        # The library checks the header, the offsets and the length of the file; it does not tell the offsets.
        with safetensors.safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            described = json.loads(file.read(size))
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    metadata = described.pop("__metadata__", None) or {}
    entries: dict[str, Entry] = {}
    for name, tensor in described.items():
        begin, end = tensor["data_offsets"]
        entries[name] = Entry(name, tensor["dtype"], tuple(tensor["shape"]), 8 + size + begin, end - begin)
    return Header(path, metadata, entries)


def read_tensor(file: BinaryIO, entry: Entry) -> NDArray[np.generic]:
    """Return one tensor of an open file, of a dtype in WIDE; only its own bytes are read."""
    tensor: NDArray[np.generic] = np.empty(entry.shape, WIDE[entry.dtype])
    _read_into(file, entry, entry.begin, tensor.view(np.uint8).data.cast("B"))
    return tensor


def copy_tensor(source: BinaryIO, entry: Entry, target: BinaryIO, begin: int) -> None:
    """Copy one tensor's bytes from file to file, some megabytes at a time."""
    buffer = memoryview(bytearray(min(entry.nbytes, COPIED_AT_ONCE)))
    target.seek(begin)
    for done in range(0, entry.nbytes, COPIED_AT_ONCE):
        chunk = buffer[: entry.nbytes - done]
        _read_into(source, entry, entry.begin + done, chunk)
        target.write(chunk)


def _read_into(file: BinaryIO, entry: Entry, begin: int, buffer: memoryview) -> None:
    try:
        file.seek(begin)
        read = file.readinto(buffer)  # type: ignore[attr-defined]
    except OSError as error:
        raise CheckpointError(f"cannot read {entry.name} of {file.name}: {error.strerror or error}") from error
    if read != buffer.nbytes:
        raise CheckpointError(f"{file.name} ended inside {entry.name}: it became shorter while it was read")


def lay_out(pieces: Iterable[Piece], metadata: dict[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Return a file's first bytes, where in the file each tensor begins, and the file's length.

    Wide dtypes come first, as the safetensors library sorts them, so that every tensor is aligned to its items.
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


@contextmanager
def appearing(path: Path, nbytes: int) -> Iterator[BinaryIO]:
    """Give a new file that takes the name ``path`` when the block ends well, and vanishes when it does not.

    Room for ``nbytes`` is asked for at once, so that a full disk is met before the work and not after it.
    Raises OSError as the system does.
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("x+b") as file:
            _reserve(file, nbytes)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _reserve(file: BinaryIO, nbytes: int) -> None:
    if nbytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last, where the system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_name(path: Path) -> Path:
    """Return a hidden name beside ``path`` that nothing has."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def leftovers(path: Path) -> list[Path]:
    """Return what has a `temporary_name` of ``path``: of runs that were killed, or that are still at work."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp")
    return sorted(one for one in path.parent.iterdir() if name.fullmatch(one.name))


def exchange(one: Path, other: Path) -> bool:
    """Let two names change places in one step, and return True; False where the system or the file system cannot.

    Raises OSError as the system does.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    sys.audit("os.rename", one, other, -1, -1)  # as Python's own does
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), os.fspath(other))


def unwritable(path: Path, nbytes: int, error: OSError) -> CheckpointError:
    """Return the refusal for a failed write: why, and how much room was needed and is there."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent).free
        reason = f"no room on the disk: {nbytes:,} bytes are needed and {free:,} are free"
    else:
        reason = error.strerror or str(error)
    return CheckpointError(f"cannot write {path}: {reason}; nothing was left behind")
