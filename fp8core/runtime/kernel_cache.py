"""Compiled kernels on disk: plain files, each named after a hash of everything that it was made from.

Whoever can write such a file chooses the code that runs in the GPU context. So only regular files that belong to this
user or root are read, from a folder that nobody else can write or replace, and nothing is written elsewhere. The path
of the folder may contain symbolic links: the folder that they lead to is checked, and all folders above it. A file in
the folder is never opened through a link.

CuPy's own cache is not used: it makes the call fail if the folder cannot be written, does not report damaged files, and
loads the compiler in every process to get its version, which takes longer than loading a kernel. The functions
here neither compile nor need a device.
"""

import errno
import hashlib
import os
import secrets
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import platformdirs

from fp8core.errors import BackendError
from fp8core.runtime.regular_files import open_regular
from fp8core.runtime.user_folders import WITHOUT_HOME, is_homeless, named_by, user_folder

FOLDER_VARIABLE: Final = "FP8CORE_CACHE_DIR"
LARGEST: Final = 64 << 20
"""The largest accepted file, in bytes; compiled kernels have tens of kilobytes."""
UNFINISHED: Final = "new-"
"""The prefix of the names of files that are being written."""
UNFINISHED_SECONDS: Final = 24 * 3600
"""A file that has been unfinished for this long was left behind by a killed process."""
_MAGIC: Final = b"fp8core\x02"
_HEADER: Final = len(_MAGIC) + hashlib.sha256().digest_size
"""The bytes before the kernel: a magic number, and a checksum of the file's name and the kernel."""
_PATH_ONLY: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Opens folders without needing permission to list them, which folders above a home folder may deny."""
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def folder() -> Path:
    """Return the folder of compiled kernels: ``$FP8CORE_CACHE_DIR``, or the user's cache folder for fp8core."""
    return named_by(FOLDER_VARIABLE) or user_folder(platformdirs.user_cache_path, ".cache") / "kernels"


def refusal() -> str | None:
    """Return why `folder` is not used; None if it is used, or does not exist yet and would be made. Makes nothing."""
    place = folder()
    try:
        with _opened(place):
            return None
    except FileNotFoundError:
        above = next(one for one in Path(os.path.realpath(place)).parents if one.exists())
        return None if os.access(above, os.W_OK | os.X_OK) else f"it cannot be made, as {above} cannot be written"
    except OSError as error:
        return _reason(error)


def name_of(*parts: str) -> str:
    """Return the file name of a kernel made from ``parts``: a hash of the parts, their lengths and their order."""
    digest = hashlib.sha256(_MAGIC)  # files of another layout have other names
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return f"{digest.hexdigest()}.kernel"


def fetch(name: str, make: Callable[[], bytes]) -> tuple[bytes, bool]:
    """Return the kernel called ``name``, and whether it was read from disk; otherwise ``make`` made it and it was kept.

    A damaged or untrusted file is made again and replaced. A folder that is untrusted, or cannot be read or written, is
    not used. Each case gives one RuntimeWarning with the path and the reason. The only exceptions raised are those of
    ``make``.
    """
    found, warned = _found(name)
    if found is not None:
        return found, True
    kernel = make()
    keep(name, kernel, quiet=warned)
    return kernel, False


def has(name: str) -> bool:
    """Return whether the folder has the kernel called ``name``, and it can be used; with the warnings of `fetch`."""
    return _found(name)[0] is not None


def _found(name: str) -> tuple[bytes | None, bool]:
    """Return the kernel called ``name`` if it can be read, and whether a warning was due."""
    place = folder()
    try:
        with _opened(place) as at:
            try:
                return _read(at, name), False
            except FileNotFoundError:
                return None, False
            except OSError as error:
                _warn(f"the compiled kernel {place / name} is not used, {_reason(error)}: compiling it again")
    except FileNotFoundError:
        return None, False
    except OSError as error:
        _warn(f"compiled kernels are neither read from {place} nor kept there: {_reason(error)}; {_ELSEWHERE}")
    return None, True


def store(name: str, kernel: bytes) -> None:
    """Write ``kernel`` under ``name``, as `keep` does.

    Raises:
        BackendError: it cannot be written; the message has the reason.
    """
    try:
        _store(name, kernel)
    except OSError as error:
        raise BackendError(f"compiled kernels cannot be kept in {folder()}: {_reason(error)}; {_ELSEWHERE}") from error


def refusal_to_write() -> str | None:
    """Make the folder if there is none, and return why no file can be made there; None if one can."""
    probe = f"{UNFINISHED}{secrets.token_hex(8)}"
    try:
        with _opened(folder(), make=True) as at:
            _write(at, probe, b"")
            os.unlink(probe, dir_fd=at)
    except OSError as error:
        return _reason(error)
    return None


def _store(name: str, kernel: bytes) -> None:
    with _opened(folder(), make=True) as at:
        _remove_unfinished(at)
        _write(at, name, _header(name, kernel) + kernel)


def keep(name: str, kernel: bytes, *, quiet: bool = False) -> None:
    """Write ``kernel`` under ``name`` atomically: readers see all of it or nothing.

    A failure gives a RuntimeWarning, except with ``quiet``: the caller has then already warned about the cache.
    """
    try:
        _store(name, kernel)
    except OSError as error:
        if not quiet:
            _warn(f"compiled kernels are not kept in {folder()}: {_reason(error)}; {_ELSEWHERE}")


def replace(name: str, kernel: bytes, reason: str) -> None:
    """Replace an intact but unusable kernel by ``kernel``, with a RuntimeWarning that gives the reason."""
    _warn(f"the compiled kernel {folder() / name} cannot be used, {reason}: compiled again")
    keep(name, kernel)


_ELSEWHERE: Final = f"set {FOLDER_VARIABLE} to another folder"


@contextmanager
def _opened(place: Path, *, make: bool = False) -> Iterator[int]:
    """Open the folder, or raise OSError with the reason; with ``make`` a missing folder is made, private to this user.

    Each folder on the path is opened relative to the one before, so that the folders that were checked are those used.
    """
    if is_homeless(place):
        raise _refused(WITHOUT_HOME)
    real = Path(os.path.realpath(place))
    at = os.open(real.anchor, _PATH_ONLY)
    try:
        _check_folder(at, Path(real.anchor), last=len(real.parts) == 1)
        for depth, part in enumerate(real.parts[1:], 2):
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=at)
            above, at = at, os.open(part, _PATH_ONLY, dir_fd=at)
            os.close(above)
            _check_folder(at, Path(*real.parts[:depth]), last=depth == len(real.parts))
        yield at
    finally:
        os.close(at)


def _check_folder(descriptor: int, path: Path, *, last: bool) -> None:
    """Raise PermissionError if others can write the folder, or, in a folder above it, replace its entries."""
    status = os.fstat(descriptor)
    _check_owner(status, f"{path} belongs")
    shared_above = not last and status.st_mode & stat.S_ISVTX  # like /tmp: others can only rename their own files
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not shared_above:
        raise _refused(f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o})")


def _check_owner(status: os.stat_result, what: str) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise _refused(f"{what} to user {status.st_uid}, not to user {os.geteuid()} or root")


def _refused(reason: str) -> PermissionError:
    return PermissionError(errno.EPERM, reason)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _read(at: int, name: str) -> bytes:
    """Return the kernel in the file ``name``, or raise OSError with the reason why it cannot be used."""
    try:
        descriptor = open_regular(name, at=at, follow=False)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused("it is a symbolic link") from error
        raise
    try:
        status = os.fstat(descriptor)
        _check_owner(status, "it belongs")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _refused(f"it can be written by others (mode {stat.S_IMODE(status.st_mode):04o})")
        if status.st_size > LARGEST:
            raise _refused(f"it is too large ({status.st_size} bytes)")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(LARGEST)
    finally:
        os.close(descriptor)
    kernel = data[_HEADER:]
    if data[:_HEADER] != _header(name, kernel):
        raise _refused(f"it is damaged ({len(data)} bytes, wrong checksum)")
    return kernel


def _header(name: str, kernel: bytes) -> bytes:
    """Return what precedes a kernel in its file. It depends on the name, so that a renamed file counts as damaged."""
    digest = hashlib.sha256(f"{name}\0".encode())
    digest.update(kernel)
    return _MAGIC + digest.digest()


def _write(at: int, name: str, data: bytes) -> None:
    temporary = f"{UNFINISHED}{secrets.token_hex(8)}"
    try:
        descriptor = os.open(temporary, _CREATE, 0o600, dir_fd=at)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, name, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with suppress(OSError):  # the first error counts, and Ctrl-C must not become a warning
            os.unlink(temporary, dir_fd=at)
        raise


def _remove_unfinished(at: int) -> None:
    """Remove files of writers that were killed long ago; another process may remove them first."""
    listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
    try:
        with os.scandir(listing) as entries:
            for entry in entries:
                if entry.name.startswith(UNFINISHED):
                    with suppress(FileNotFoundError):
                        if time.time() - entry.stat(follow_symlinks=False).st_mtime > UNFINISHED_SECONDS:
                            os.unlink(entry.name, dir_fd=at)
    finally:
        os.close(listing)


_WARNED: Final[set[str]] = set()
"""The warnings given so far."""


def _warn(text: str) -> None:
    if text not in _WARNED:
        _WARNED.add(text)  # first: where warnings are errors, the next call has to go on, as it does elsewhere
        warnings.warn(text, RuntimeWarning, stacklevel=4)
