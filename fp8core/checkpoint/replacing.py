"""Files and folders that take their name whole or not at all, and what runs that were killed leave behind.

What is being written has a hidden name beside its target, ``.NAME.<8 hex digits>.fp8core``, and is locked (flock) while
its run lives. So a later run can tell what a killed one left from what another one is still writing.
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

from fp8core.runtime.locks import lock, try_lock

SUFFIX: Final = ".fp8core"
"""How the hidden name of what is being written ends."""
OLD: Final = ".fp8core-old"
"""How the hidden name of a folder ends that has made way, where two names cannot be exchanged in one step."""
UNABLE: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems say that cannot do what not every one can."""
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
"""Of Linux: <fcntl.h> and <linux/fs.h>."""


class Leftover(NamedTuple):
    """What was found under a hidden name of a target."""

    path: Path
    busy: bool
    """Whether a run that still lives holds its lock, or the file system cannot tell."""

    @property
    def old(self) -> bool:
        """Whether it is a whole folder that had made way for a new one."""
        return self.path.name.endswith(OLD)


class Pending:
    """A new file under a hidden name, open and locked."""

    def __init__(self, path: Path, temporary: Path, file: BinaryIO) -> None:
        self.path, self.temporary, self.file = path, temporary, file

    def appear(self) -> None:
        """Let the file take its name, and what had it go; raises OSError as the system does."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.temporary.replace(self.path)
        sync_folder(self.path.parent)


@contextmanager
def pending_file(path: Path, nbytes: int) -> Iterator[Pending]:
    """Give a new file that vanishes at the end of the block unless it was told to `Pending.appear`.

    Room for ``nbytes`` is asked for at once, so that a full disk is met before the work and not after it.
    Raises OSError as the system does.
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
    """Give a new folder that vanishes at the end of the block unless it took the name ``path`` (`take_name`)."""
    temporary = _hidden(path, SUFFIX)
    try:
        temporary.mkdir()
        handle = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _lock(handle, temporary)
            yield temporary
        finally:
            os.close(handle)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


def reserve(file: BinaryIO, nbytes: int) -> None:
    """Ask for room on the disk, where the file system can; raises OSError as the system does."""
    if nbytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno not in UNABLE:
                raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last, where the file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNABLE:
            raise
    finally:
        os.close(handle)


def take_name(folder: Path, target: Path) -> None:
    """Give a folder the name of another, which is removed: in one step, or in two where the system has no other way.

    A run that is killed between these two leaves ``target`` under a hidden name that ends in OLD.
    """
    if not target.exists():
        folder.rename(target)
    elif exchange(folder, target):
        shutil.rmtree(folder)
    else:
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
    if number in UNABLE:
        return False
    raise OSError(number, os.strerror(number), os.fspath(other))


def leftovers(path: Path) -> list[Leftover]:
    """Return what has a hidden name of ``path``: of runs that were killed, or that are still at work."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}({re.escape(SUFFIX)}|{re.escape(OLD)})")
    found = sorted(one for one in path.parent.iterdir() if name.fullmatch(one.name))
    return [Leftover(one, _busy(one)) for one in found]


def remove(left: Leftover) -> bool:
    """Remove a leftover and return True, or False where a run holds it; raises OSError as the system does."""
    handle = os.open(left.path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if not try_lock(handle):
            return False
        if left.path.is_dir():
            shutil.rmtree(left.path)
        else:
            left.path.unlink()
    finally:
        os.close(handle)
    return True


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")


def _lock(handle: int, path: Path) -> None:
    """Lock a new file or folder until it is closed, where the file system has locks.

    Raises:
        BlockingIOError: another run took it for a leftover, in the moment between its making and this.
    """
    lock(handle)  # others hold it for a moment only, to see whether it is locked
    if not path.exists():
        raise BlockingIOError(errno.EAGAIN, f"another run removed {path} when it was new; run again", str(path))


def _busy(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile, or not ours to open
        return True
    try:
        return not try_lock(handle)
    finally:
        os.close(handle)
