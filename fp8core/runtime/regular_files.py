"""Opens and reads regular files and nothing else, without waiting: the end of a FIFO may never come."""

import errno
import os
import stat
from typing import Final

_OPEN: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | os.PathLike[str], *, at: int | None = None, follow: bool = True) -> int:
    """Return the descriptor of a regular file that is open for reading.

    Args:
        path: the file.
        at: the descriptor of the folder that the path is relative to.
        follow: whether the path may be a symbolic link.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, _OPEN if follow else _OPEN | os.O_NOFOLLOW, dir_fd=at)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(number, f"it is {_KINDS.get(stat.S_IFMT(mode), 'no regular file')}", os.fspath(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a regular file; raise OSError as `open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()
