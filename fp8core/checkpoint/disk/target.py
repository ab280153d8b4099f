"""The target of a new checkpoint: the checks before any work, and the leftovers of killed runs."""

import errno
import json
import os
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fp8core.checkpoint.disk.extras import RECORD
from fp8core.checkpoint.disk.replacing import Leftover, leftovers, remove
from fp8core.checkpoint.disk.source import Source
from fp8core.errors import CheckpointError
from fp8core.runtime.regular_files import read_regular

Identity = tuple[int, int] | None


class Destination(NamedTuple):
    """A checked target."""

    given: Path
    """The path as the caller gave it, for messages."""
    path: Path
    """The path with symbolic links followed: the links stay, and lead to the new files."""
    is_folder: bool

    @property
    def config_file(self) -> Path:
        """The file for the configuration of a checkpoint that is a single file."""
        return self.path.with_suffix(".config.json")

    @property
    def names(self) -> tuple[Path, ...]:
        """The paths that a run replaces: a folder, or a file and its configuration."""
        return (self.path,) if self.is_folder else (self.path, self.config_file)

    def identity(self) -> Identity:
        """Return the device and inode of the target, which identify it; None if it does not exist."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def left(self) -> list[Leftover]:
        """Return the files and folders under hidden names of the target, or of a file's configuration."""
        return [left for name in self.names for left in leftovers(name)]


def destination(source: Source, target: Path, *, force: bool) -> Destination:
    """Return the checked target, after refusing one that cannot or must not be replaced.

    Raises:
        CheckpointError: the target exists, holds files that fp8core did not write, or its parent folder does not exist.
    """
    try:
        found = Destination(target, target.resolve(), source.is_folder)
        _refuse(source, found, force=force)
    except (OSError, RuntimeError) as error:  # RuntimeError: symbolic links in a circle
        raise CheckpointError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from error
    return found


def _refuse(source: Source, found: Destination, *, force: bool) -> None:
    target, there, here = found.given, found.path, source.path.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise CheckpointError(f"target needs to be outside of the source {source.path}, got {target}")
    if not there.parent.is_dir():
        raise CheckpointError(f"cannot write {target}: there is no folder {there.parent}")
    _refuse_unwritable(target, there.parent)
    if not source.is_folder and there.suffix != ".safetensors":
        raise CheckpointError(f"target of a file needs to end in .safetensors, got {target}")
    if os.path.ismount(there):
        raise CheckpointError(
            f"cannot write {target}: it is a mount point, which cannot be replaced: name a folder in it"
        )
    exists = [one for one in found.names if one.exists()]
    if exists and not force:
        shown = target if exists[0] == there else exists[0]
        raise CheckpointError(f"{shown} exists: give another name, or force (--force) to replace it")
    if there.exists() and there.is_dir() != source.is_folder:
        raise CheckpointError(f"cannot replace {target}: a {'folder' if source.is_folder else 'file'} would be written")
    if there.is_dir():
        _refuse_folder(found)
    elif any(not one.is_file() for one in exists):
        raise CheckpointError(f"cannot replace {target}: it is not a plain file")


def _refuse_folder(found: Destination) -> None:
    """Refuse to replace a folder with files that fp8core did not write."""
    target, there = found.given, found.path
    with suppress(FileNotFoundError):  # the current folder has been removed: no folder holds it
        working = Path.cwd()
        if there == working or there in working.parents:
            raise CheckpointError(f"cannot replace {target}: it is the current folder, or holds it")
    files: dict[str, int] = {}
    for place, below, names in os.walk(there):
        folder = Path(place)
        _refuse_unwritable(target, folder)
        for one in (*names, *(one for one in below if (folder / one).is_symlink())):
            files[str((folder / one).relative_to(there))] = (folder / one).lstat().st_size
    wrote = _record(there)
    if wrote is None and files:
        raise CheckpointError(
            f"will not replace {target}: fp8core did not write it (it has no {RECORD}), and it holds {_some([*files])}"
        )
    foreign = [name for name in files if name not in {RECORD: 0, **(wrote or {})}]
    if foreign:
        raise CheckpointError(f"will not replace {target}: it holds {_some(foreign)}, which fp8core did not write")
    changed = [name for name, nbytes in (wrote or {}).items() if files.get(name, nbytes) != nbytes]
    if changed:
        raise CheckpointError(f"will not replace {target}: {_some(changed)} changed since fp8core wrote it")


def _refuse_unwritable(target: Path, folder: Path) -> None:
    """Refuse a folder in which no file can be made or removed."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CheckpointError(f"cannot write {target}: the folder {folder} cannot be written")


def _record(folder: Path) -> dict[str, int] | None:
    """Return the sizes of the files that fp8core wrote into a folder, from its record, or None without one."""
    try:
        record = json.loads(read_regular(folder / RECORD))
    except (OSError, ValueError, RecursionError):
        return None
    files = record.get("files") if isinstance(record, dict) else None
    return files if isinstance(files, dict) else None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def refuse_without_room(found: Destination, nbytes: int) -> None:
    """Refuse a target whose disk has less free space than ``nbytes``."""
    free = shutil.disk_usage(found.path.parent).free
    if nbytes > free:
        raise CheckpointError(
            f"cannot write {found.given}: no room on the disk: {nbytes:,} bytes are needed and {free:,} are free"
        )


def clear_leftovers(found: Destination, *, only_tell: bool) -> None:
    """Remove leftovers of killed runs with this target, with a warning; refuse a target that a live run is writing.

    Raises:
        CheckpointError: another live run is writing the same target.
    """
    for left in found.left():
        if left.old and not found.path.exists():
            _warn(f"{left.path} is {found.given} from before a killed run: rename it to restore it")
        elif left.busy:
            raise CheckpointError(
                f"cannot write {found.given}: another run is writing it, as {left.path}; "
                "if none is (file systems without locks), remove that"
            )
        elif only_tell:
            _warn(f"{left.path} was left by a run that was killed: the next one removes it")
        else:
            try:
                removed = remove(left)
            except OSError as error:
                _warn(f"{left.path} was left by a run that was killed, and cannot be removed: {error.strerror}")
            else:
                _warn(
                    f"{left.path} was left by a run that was killed: {'removed' if removed else 'in use, not removed'}"
                )


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=6)  # reported for the line that called a public function


def unfinished(source: Source, found: Destination, nbytes: int, error: OSError, before: Identity) -> CheckpointError:
    """Return the error for a failed write: the reason, the space that it needed, and the state of the target."""
    reason = error.strerror or str(error)
    what = f"write {found.given}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(found.path.parent).free
        reason = f"no room on the disk ({reason}) for {nbytes:,} bytes; {free:,} are free after cleaning up"
    elif isinstance(error.filename, str | os.PathLike) and error.filename2 is None:  # a failed copy has two names
        what = f"read {error.filename}" if Path(error.filename).is_relative_to(source.path) else what
    return CheckpointError(f"cannot {what}: {reason}; {state(found, before)}")


def state(found: Destination, before: Identity) -> str:
    """Return a description of what a failed run has left, as the disk shows it."""
    left = found.left()
    names = ", ".join(str(one.path) for one in left)
    behind = f"{names} {'was' if len(left) == 1 else 'were'} left behind" if left else "nothing was left behind"
    if found.identity() != before:
        return f"{found.given} is the new one; {behind}"
    return behind if before is None else f"{found.given} is as it was; {behind}"
