"""Locks of open files (flock), where the file system has such locks: not every network or parallel one has."""

import errno
import fcntl
from typing import Final

NO_LOCKS: Final = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems say that lock nothing."""


def lock(handle: int) -> bool:
    """Wait for the lock of an open file or folder, which holds until that is closed.

    Returns:
        Whether it is locked: False where the file system locks nothing.

    Raises:
        OSError: as the system does.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return False
        raise
    return True


def try_lock(handle: int) -> bool:
    """Lock an open file or folder if nobody else does, and return whether it is; False where the system cannot tell.

    Raises:
        OSError: as the system does.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, *NO_LOCKS):
            return False
        raise
    return True
