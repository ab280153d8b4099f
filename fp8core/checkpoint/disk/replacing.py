"""Creates files and folders atomically, and finds what killed runs left behind.

A file or folder that is being written has a hidden name beside its target, ``.NAME.<8 hex digits>.fp8core``, and is
locked (flock) while its run lives. So a later run can tell leftovers of a killed run from files of a run that is still
writing.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from fp8core.runtime.locks import lock, try_lock, unlock

SUFFIX: Final = ".fp8core"
"""The suffix of the hidden name of a file or folder that is being written."""
OLD: Final = ".fp8core-old"
"""The suffix of the hidden name of a replaced folder, if two names cannot be exchanged in one step."""
UNABLE: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""The errors of file systems that do not support an operation."""
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
"""Linux constants, from <fcntl.h> and <linux/fs.h>."""


class Leftover(NamedTuple):
    """A file or folder under a hidden name of a target."""

    path: Path
    busy: bool
    """Whether a live run holds its lock, or the file system cannot tell."""

    @property
    def old(self) -> bool:
        """Whether it is a complete folder that was to be replaced by a new one."""
        return self.path.name.endswith(OLD)


class Pending:
    """A new file under a hidden name, open and locked."""

    def __init__(self, path: Path, temporary: Path, file: BinaryIO) -> None:
        self.path, self.temporary, self.file = path, temporary, file

    def appear(self) -> None:
        """Give the file its name, replacing the file of that name; raises OSError if the system does."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.temporary.replace(self.path)
        sync_folder(self.path.parent)


@contextmanager
def pending_file(path: Path, nbytes: int) -> Iterator[Pending]:
    """Create a new file, which is deleted at the end of the block unless `Pending.appear` was called.

    The file's ``nbytes`` are reserved first, so that a full disk is detected before the work and not after it.
    Raises OSError if the system does.
    """
    temporary = _hidden(path, SUFFIX)
    try:
        with temporary.open("x+b") as file:
            _lock(file.fileno(), temporary)
            reserve(file, nbytes)
            yield Pending(path, temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def pending_folder(path: Path) -> Iterator[Path]:
    """Create a new folder. What has its hidden name is deleted at the end of the block.

    That is the new folder or, if `take_name` exchanged their names, the old one.
    """
    temporary = _hidden(path, SUFFIX)
    try:
        temporary.mkdir()
        handle = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _lock(handle, temporary)
            yield temporary
        finally:
            _close(handle)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


def reserve(file: BinaryIO, nbytes: int) -> None:
    """Reserve disk space for a file, if the file system supports it; raises OSError if the system does."""
    if nbytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno not in UNABLE:
                raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable (fsync), if the file system supports it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNABLE:
            raise
    finally:
        os.close(handle)


def take_name(folder: Path, target: Path) -> None:
    """Give a folder the name of another one: in one step, or in two if the system requires it.

    After one step the other one has the name of ``folder``, under which `pending_folder` removes it. A run that is
    killed between the two steps leaves it under a hidden name that ends in `OLD`.
    """
    if not target.exists():
        folder.rename(target)
    elif not exchange(folder, target):
        old = _hidden(target, OLD)
        target.rename(old)
        try:
            folder.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old)
    sync_folder(target.parent)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return False if the system or the file system does not support it.

    Raises OSError if the system does.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    sys.audit("os.rename", one, other, -1, -1)  # as os.rename does
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNABLE:
        return False
    raise OSError(number, os.strerror(number), os.fspath(other))


def leftovers(path: Path) -> list[Leftover]:
    """Return the files and folders under hidden names of ``path``, of killed runs and of live ones."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}({re.escape(SUFFIX)}|{re.escape(OLD)})")
    found = sorted(one for one in path.parent.iterdir() if name.fullmatch(one.name))
    return [Leftover(one, _busy(one)) for one in found]


def remove(left: Leftover) -> bool:
    """Remove a leftover; return False if a run holds its lock. Raises OSError if the system does."""
    handle = os.open(left.path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if not try_lock(handle):
            return False
        if left.path.is_dir():
            shutil.rmtree(left.path)
        else:
            left.path.unlink()
    finally:
        _close(handle)
    return True


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")


def _lock(handle: int, path: Path) -> None:
    """Lock a new file or folder until it is closed, if the file system has locks.

    Raises:
        BlockingIOError: another run removed it as a leftover between its creation and this call.
    """
    lock(handle)  # other runs hold the lock only briefly, to test whether it is held
    if not path.exists():
        raise BlockingIOError(errno.EAGAIN, f"another run removed {path} when it was new; run again", str(path))


def _busy(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # it is gone meanwhile, or may not be opened
        return True
    try:
        return not try_lock(handle)
    finally:
        _close(handle)


def _close(handle: int) -> None:
    """Close a file or folder, and end its lock: a child that was forked meanwhile has it open, too."""
    try:
        unlock(handle)
    finally:
        os.close(handle)
