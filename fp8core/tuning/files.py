"""Tunings in a file, one per line: written atomically under a lock, and read with one warning about unusable lines."""

import errno
import os
import re
import secrets
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import platformdirs

from fp8core.errors import TuningError
from fp8core.interop.names import type_name
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import ScaledMm
from fp8core.runtime import device
from fp8core.runtime.locks import lock, unlock
from fp8core.runtime.regular_files import open_regular
from fp8core.runtime.user_folders import WITHOUT_HOME, is_homeless, named_by, user_folder
from fp8core.target import ABSENT, Target
from fp8core.tuning.values import APPLIED, Machine, Tuning, choosing, is_for, machine

FILE_VARIABLE: Final = "FP8CORE_TUNINGS"
LARGEST: Final = 256 << 20
"""The largest accepted file, in bytes; a line has one to three thousand."""
_BEGINNING: Final = b'{"check":'
"""The beginning of each line."""
_SHOWN: Final = "GPU", "driver", "BLAS library", "fp8core", "kernels"
"""The names of the fields of a `Machine` in messages."""


class Contents(NamedTuple):
    """The contents of a file: tunings of any machine, the number of damaged lines, and whether it is another file."""

    tunings: list[Tuning]
    damaged: int
    strange: bool


def tunings_file() -> Path:
    """Return the default file: ``$FP8CORE_TUNINGS``, or ``tunings.jsonl`` in the user's data folder."""
    return named_by(FILE_VARIABLE) or user_folder(platformdirs.user_data_path, ".local/share") / "tunings.jsonl"


def save_tunings(path: str | os.PathLike[str] | None = None, tunings: Iterable[Tuning] | None = None) -> Path:
    """Add tunings to a file; a new one replaces the old one for the same product on the same kind of machine.

    Several processes may save at the same time: each waits for the others. Readers see the old file or the new one.

    Args:
        path: the file; it and its folders are made if they are missing. None means ``$FP8CORE_TUNINGS``, or if that is
            not set ``tunings.jsonl`` in the user's data folder for fp8core.
        tunings: the tunings to write; None means all that were tuned or loaded in this process.

    Returns:
        The path of the file.

    Raises:
        TypeError: ``path`` is no path, or ``tunings`` is no iterable of tunings.
        OSError: the file cannot be read or written. It is unchanged.
        TuningError: the file holds something other than tunings. It is unchanged.

    Warns:
        RuntimeWarning: the file had damaged lines; they have been removed.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import fp8core
        >>> with TemporaryDirectory() as folder:
        ...     path = fp8core.save_tunings(f"{folder}/tunings.jsonl")
        ...     fp8core.load_tunings(path)  # nothing was tuned
        ()
    """
    given = _path(path)
    fresh = list(APPLIED.values()) if tunings is None else _listed(tunings)
    with _opened(given) as (file, before, locked):
        kept = {tuning.key: tuning for tuning in (*before.tunings, *fresh)}
        if locked:
            _remove_unfinished(file)
        _write(file, "".join(f"{tuning.to_json()}\n" for tuning in kept.values()))
    if before.damaged:
        _warn(f"removed {_lines(before.damaged)} of {given} that held no tuning")
    return given


def _path(path: str | os.PathLike[str] | None) -> Path:
    try:
        return tunings_file() if path is None else Path(path)
    except TypeError as error:
        raise TypeError(f"path needs a str or an os.PathLike, got {type_name(path)}") from error


def _listed(tunings: Iterable[Tuning]) -> list[Tuning]:
    try:
        listed = list(tunings)
    except TypeError as error:
        raise TypeError(f"tunings needs an iterable of tunings, got {type_name(tunings)}") from error
    for tuning in listed:
        if not isinstance(tuning, Tuning):
            raise TypeError(f"tunings needs objects of the class Tuning, got {type_name(tuning)}")
    return listed


def check_writable(path: Path) -> None:
    """Raise the error that would keep `save_tunings` from writing a file, before hours are spent on tuning."""
    with _opened(path):
        pass


@contextmanager
def _opened(given: Path) -> Iterator[tuple[Path, Contents, bool]]:
    """Lock a file; yield its real path, its contents, and whether it is locked.

    Raises:
        OSError: the file cannot be read or locked.
        TuningError: it holds something else.
    """
    _check_home(given)
    file = Path(os.path.realpath(given))
    _accepted(file, given)  # before a folder or a lock is made beside a file that is refused
    file.parent.mkdir(parents=True, exist_ok=True)
    with _alone(file) as locked:
        yield file, _accepted(file, given), locked


def _check_home(given: Path) -> None:
    """Raise FileNotFoundError if a path begins with ``~`` or ``~user``: nothing is read or written in such a folder."""
    if is_homeless(given):
        raise FileNotFoundError(errno.ENOENT, WITHOUT_HOME, str(given))


def _accepted(file: Path, given: Path) -> Contents:
    """Return the contents of a file, empty if it is missing; raise TuningError if it holds something else."""
    try:
        found = _read(file)
    except FileNotFoundError:
        return Contents([], 0, strange=False)
    if found.strange:
        raise TuningError(f"path needs a file of tunings, or a new file, got {given}, which holds something else")
    return found


def load_tunings(path: str | os.PathLike[str] | None = None) -> tuple[Tuning, ...]:
    """Make products run the kernel that, by a file, was the fastest for them on such a machine.

    A tuning is used if the GPU, driver, BLAS library, fp8core and its kernels are the ones that were timed; it is then
    used on all devices of that kind. It replaces an earlier tuning of the same product. A call that another thread
    makes meanwhile may still run the former kernel.

    Args:
        path: the file. None means the default of `save_tunings`, which may be missing.

    Returns:
        The tunings that are used here.

    Raises:
        TypeError: ``path`` is no path.
        OSError: the file cannot be read. Only the one in the user's data folder may be missing.

    Warns:
        RuntimeWarning: once, if lines are damaged, or if no tuning can be used here.

    Examples:
        >>> import fp8core
        >>> fp8core.load_tunings("/nowhere/tunings.jsonl")
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/tunings.jsonl'
    """
    given = _path(path)
    try:
        _check_home(given)
        found = _read(given)
    except FileNotFoundError:
        if path is None and not os.environ.get(FILE_VARIABLE):
            return ()
        raise
    useful = [(tuning, problems) for tuning in found.tunings if (problems := tuning.problems())]
    with choosing():
        for tuning, problems in useful:
            for problem in problems:
                SCALED_MM.expect(problem, tuning.chosen.kernel, tuning.chosen.name)
            APPLIED[tuning.key] = tuning
    reasons = [f"{_lines(found.damaged)} damaged"] if found.damaged else []
    if found.tunings and not useful:
        reasons.append(_why_none(found.tunings))
    if reasons:
        _warn(f"{'some ' if useful else ''}tunings in {given} are not used: {'; '.join(reasons)}")
    return tuple(tuning for tuning, _ in useful)


def load_named(product: ScaledMm) -> bool:
    """Load the file in ``$FP8CORE_TUNINGS``, if that is set, before a product on a GPU; warn if it cannot be read.

    Products on the host, or on a device that is not in this machine, do not need it. Loading asks the driver for
    devices, after which no forked child could use one.

    Returns:
        Whether that is done.
    """
    if product.target.platform == "host" or product.target.device == ABSENT:
        return False
    if os.environ.get(FILE_VARIABLE):
        try:
            load_tunings()
        except OSError as error:
            _warn_unread(error)
    return True


def named_ahead(target: Target) -> list[Tuning]:
    """Return the tunings in ``$FP8CORE_TUNINGS`` for a target without a device; warn if the file cannot be read."""
    if not os.environ.get(FILE_VARIABLE):
        return []
    try:
        _check_home(tunings_file())
        found = _read(tunings_file())
    except OSError as error:
        _warn_unread(error)
        return []
    return [tuning for tuning in found.tunings if is_for(tuning, target)]


def _warn_unread(error: OSError) -> None:
    _warn(f"tunings in {tunings_file()}, which {FILE_VARIABLE} names, are not used: {error.strerror or error}")


def _read(file: Path) -> Contents:
    """Return the contents of a file; raise OSError if it cannot be read."""
    with os.fdopen(open_regular(file), "rb") as opened:
        data = opened.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise OSError(errno.EFBIG, f"more than {LARGEST:,} bytes", str(file))
    tunings, damaged = [], []
    for line in filter(bytes.strip, data.splitlines()):
        try:
            tunings.append(Tuning.from_json(line.decode()))
        except (TuningError, UnicodeDecodeError):
            damaged.append(line)
    strange = bool(damaged) and not tunings and not any(line.startswith(_BEGINNING) for line in damaged)
    return Contents(tunings, len(damaged), strange)


def _remove_unfinished(file: Path) -> None:
    """Remove what writers have left that were killed. The caller holds the lock: others may be writing without it."""
    for left in file.parent.iterdir():
        if re.fullmatch(rf"\.{re.escape(file.name)}\.[0-9a-f]{{16}}", left.name):
            left.unlink()


def _write(file: Path, text: str) -> None:
    """Write a file atomically: readers see the old or the new contents."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        temporary.replace(file)
    except BaseException as error:
        with suppress(OSError):  # the first error counts
            temporary.unlink()
        if isinstance(error, OSError):  # the error of a full disk has no file name
            error.filename = str(file)
        raise


@contextmanager
def _alone(file: Path) -> Iterator[bool]:
    """Hold the lock of a file: that of an empty file beside it, which is kept; yield whether there are locks."""
    beside = os.open(file.with_name(f"{file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        yield lock(beside)
    finally:
        try:
            unlock(beside)  # closing is not enough: a child that was forked meanwhile has the file open, too
        finally:
            os.close(beside)


def _why_none(tunings: list[Tuning]) -> str:
    """Return the reasons why tunings are not used here, each with the number of tunings."""
    here = [machine(device.target(i)) for i in range(device.count())]
    if not here:
        return f"{_lines(len(tunings))} for a GPU, but there is none: {device.why_none()}"
    reasons = Counter(min((_difference(tuning.machine, one) for one in here), key=len) for tuning in tunings)
    return "; ".join(f"{_lines(number)} for {reason}" for reason, number in reasons.items())


def _difference(there: Machine, here: Machine) -> str:
    named = zip(_SHOWN, there, here, strict=True)
    parts = [f"{what} {one} (here {other})" for what, one, other in named if one != other]
    return "another " + ", ".join(parts) if parts else "a GPU with other properties"


def _lines(number: int) -> str:
    return f"{number:,} line{'' if number == 1 else 's'}"


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
