"""Compiled kernels on disk: plain files under a name that says what they were made from.

CuPy has such a cache, and it is not used because it fails the call in a folder that cannot be written, keeps
silent about files that it finds damaged, and starts the compiler in every process only to ask for its version,
which costs more than loading a kernel does. The functions here neither compile nor need a device.
"""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import platformdirs

FOLDER_VARIABLE: Final = "FP8CORE_CACHE_DIR"
_MAGIC: Final = b"fp8core\x01"
_HEADER: Final = len(_MAGIC) + hashlib.sha256().digest_size


def folder() -> Path:
    """Return where compiled kernels are kept: ``$FP8CORE_CACHE_DIR``, or the user's cache folder for fp8core."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    return Path(chosen) if chosen else platformdirs.user_cache_path("fp8core", appauthor=False) / "kernels"


def name_of(*parts: str) -> str:
    """Return the file name for a kernel made from ``parts``, whose order and borders count."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return f"{digest.hexdigest()}.kernel"


def fetch(name: str, make: Callable[[], bytes]) -> tuple[bytes, bool]:
    """Return the kernel called ``name`` and whether it came from the disk; if not, ``make`` made it and it was kept.

    A damaged file is made anew and replaced, and a folder that cannot be read or written is done without: each
    with one RuntimeWarning that names the place and the reason. Only what ``make`` raises is raised.
    """
    place = folder()
    kernel = _read(place / name)
    if kernel is not None:
        return kernel, True
    kernel = make()
    keep(name, kernel)
    return kernel, False


def keep(name: str, kernel: bytes) -> None:
    """Write ``kernel`` under ``name`` so that readers see all of it or nothing; a failure is a RuntimeWarning."""
    place = folder()
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=place, prefix="new-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(kernel).digest() + kernel)
            os.replace(temporary, place / name)  # noqa: PTH105 - the name comes from mkstemp as text
        except BaseException:
            os.unlink(temporary)  # noqa: PTH108
            raise
    except OSError as error:
        _warn(f"compiled kernels are not kept in {place}: {error.strerror or error}; set {FOLDER_VARIABLE} elsewhere")


def replace(name: str, kernel: bytes, reason: str) -> None:
    """Write ``kernel`` over one that is whole and yet of no use, with a RuntimeWarning that gives the reason."""
    _warn(f"the compiled kernel {folder() / name} is of no use, {reason}: compiled again")
    keep(name, kernel)


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(f"compiled kernels are not read from {path.parent}: {error.strerror or error}")
        return None
    kernel = data[_HEADER:]
    if data[:_HEADER] == _MAGIC + hashlib.sha256(kernel).digest():
        return kernel
    _warn(f"the compiled kernel {path} is damaged ({len(data)} bytes, wrong checksum): compiling it again")
    return None


@cache
def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)
