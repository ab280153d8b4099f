"""Locks of open files (flock). Some network and parallel file systems do not support them."""

import errno
import fcntl
from typing import Final

NO_LOCKS: Final = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The errors of file systems that do not support locks."""


def lock(handle: int) -> bool:
    """Wait for the lock of an open file or folder; it is held until `unlock`, or until the file is closed.

    A child that is forked meanwhile has the file open, too: then only `unlock` ends the lock.

    Returns:
        Whether the file is locked; False if the file system does not support locks.

    Raises:
        OSError: locking fails for another reason.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return False
        raise
    return True


def try_lock(handle: int) -> bool:
    """Lock an open file or folder unless it is locked already; return whether this call locked it.

    Returns False, too, if the file system does not support locks.

    Raises:
        OSError: locking fails for another reason.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, *NO_LOCKS):
            return False
        raise
    return True


def unlock(handle: int) -> None:
    """End the lock of an open file or folder, also for the children that have inherited it.

    Raises:
        OSError: unlocking fails, except where the file system does not support locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
