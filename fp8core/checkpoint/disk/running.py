"""Writes a new checkpoint: the checks before, the work, and the error messages if it fails."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from fp8core.checkpoint.disk.extras import Extra
from fp8core.checkpoint.disk.source import Source
from fp8core.checkpoint.disk.target import (
    Destination,
    Identity,
    clear_leftovers,
    destination,
    refuse_without_room,
    state,
    unfinished,
)
from fp8core.checkpoint.disk.writing import Advance, NewFile, json_bytes, write_file, write_folder
from fp8core.errors import CheckpointError

Progress = Callable[[str, int, int], None]
"""Called with a tensor's name, the bytes of the source's tensors that are done, and the bytes of all of them."""
BLOCK_OF_DISK: Final = 4096
"""File sizes are rounded up to a multiple of this when disk space is counted, in bytes."""


class Work(NamedTuple):
    """The files to write."""

    source: Source
    files: Sequence[NewFile]
    extras: Sequence[Extra]
    """The source's other files and folders."""
    documents: Mapping[str, dict[str, Any]]
    """For a folder: the JSON files to write, by name."""
    beside: dict[str, Any] | None
    """For a file: the content of the JSON file beside it; None if there is none."""


def room(work: Work) -> int:
    """Return the disk space that the new files need, in bytes."""
    sizes = [one.size() for one in work.files] + [extra.nbytes for extra in work.extras if extra.copied]
    sizes += [len(json_bytes(one)) for one in work.documents.values()]
    return sum(-(-size // BLOCK_OF_DISK) * BLOCK_OF_DISK for size in sizes)


def check(work: Work, target: Path, *, force: bool) -> None:
    """Raise the errors that `run` would raise before it writes; nothing is written.

    Raises:
        CheckpointError: the target exists or cannot be written.
    """
    _checked(work, target, force=force, only_tell=True)


def _checked(work: Work, target: Path, *, force: bool, only_tell: bool) -> tuple[Destination, Identity]:
    """Return the checked target and its identity, if it exists; remove the leftovers of killed runs unless told not to.

    Raises:
        CheckpointError: the target exists or cannot be written.
    """
    found = destination(work.source, target, force=force)
    try:
        clear_leftovers(found, only_tell=only_tell)
        refuse_without_room(found, room(work))
        return found, found.identity()
    except OSError as error:
        raise CheckpointError(f"cannot write {found.given}: {error.strerror or error}") from error


def run(work: Work, target: Path, *, force: bool, progress: Progress | None) -> Destination:
    """Write new files to the target; they appear complete or not at all.

    Raises:
        CheckpointError: the target exists, now or when all is written, or cannot be written; or the source has changed.
    """
    source = work.source
    found, before = _checked(work, target, force=force, only_tell=False)
    advance = advancing(progress, sum(entry.nbytes for entry in source.entries))

    def recheck() -> None:
        """Repeat the checks of the beginning, and refuse changes since then: the work takes long."""
        source.refuse_changed()
        destination(source, target, force=force)
        if found.identity() not in (before, None):
            raise CheckpointError(f"will not replace {found.given}: it appeared while this run was writing")

    try:
        if source.is_folder:
            write_folder(source, work.files, found, work.extras, work.documents, advance, recheck)
        else:
            write_file(work.files[0], found, work.beside, advance, recheck)
    except OSError as error:
        raise unfinished(source, found, sum(one.size() for one in work.files), error, before) from error
    except (KeyboardInterrupt, SystemExit) as stop:
        stop.add_note(state(found, before))
        raise
    return found


def advancing(progress: Progress | None, total: int) -> Advance:
    """Return a function that adds up the bytes that are done, and tells ``progress``, if there is one, of them."""
    done = 0

    def advance(tensor: str, nbytes: int) -> None:
        nonlocal done
        done = min(done + nbytes, total)  # experts that are split repeat the scales that they share
        if progress is not None:
            progress(tensor, done, total)

    return advance
