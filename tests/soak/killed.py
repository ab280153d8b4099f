"""Runs a writer again and again in forked processes, killed at each thing that it asks of the file system in turn.

`python killed.py cache FOLDER`, or `python killed.py checkpoint SOURCE TARGET`, or the same with `convert`: prints, one JSON
line a death, what is there afterwards; `old` and `new` are what is there before, and after a run to its end, and `left` the
hidden names that are there then.
"""

import hashlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fp8core.checkpoint import convert_checkpoint, quantize_checkpoint
from fp8core.runtime import kernel_cache
from fp8core.types import ConversionName

OLD, NEW = b"\x7fELF the old kernel" * 99, b"\x7fELF the new kernel" * 77
EVENTS = ("open", "os.", "shutil.", "tempfile.", "pathlib.", "progress")
MOST = 400


def killed_at(number: int, writer: Callable[[], None], places: Sequence[str]) -> bool:
    """Run ``writer`` in a child that kills itself at the ``number``th event about one of ``places``; return whether it died."""
    child = os.fork()
    if not child:
        left = [number]

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event.startswith(EVENTS) and any(place in str(a) for place in places for a in arguments):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        writer()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert status == 0, f"the writer failed with {status}"
    return False


def digest(path: Path) -> str | None:
    """Return the digest of a file, or of all files of a folder but hidden ones; None where nothing is."""
    if path.is_dir():
        parts = [f"{p.name} {digest(p)}" for p in sorted(path.iterdir()) if not p.name.startswith(".")]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def deaths(
    writer: Callable[[], None], before: Callable[[], None], seen: Callable[[], Any], places: Sequence[str]
) -> None:
    """Print what is seen after each death."""
    for number in range(MOST):
        before()
        old = seen()
        died = killed_at(number, writer, places)
        found = seen()
        writer()
        left = sorted(p.name for place in places for p in Path(place).glob(".*.fp8core*"))
        print(json.dumps({"number": number, "died": died, "old": old, "found": found, "new": seen(), "left": left}))
        if not died:
            return
    raise SystemExit(f"not done after {MOST} events")


def cache(folder: str) -> None:
    """Write a kernel over an old one."""
    os.environ[kernel_cache.FOLDER_VARIABLE] = folder
    name = kernel_cache.name_of("text")

    def seen() -> str:
        with warnings.catch_warnings(action="error"):
            kernel, _ = kernel_cache.fetch(name, lambda: b"made anew")
        return {OLD: "old", NEW: "new"}.get(kernel, repr(kernel))

    places = folder, Path(folder).name, kernel_cache.UNFINISHED, ".kernel"  # names in open folders have no path
    deaths(lambda: kernel_cache.keep(name, NEW), lambda: kernel_cache.keep(name, OLD), seen, places)


def checkpoint(source: str, target: str) -> None:
    """Write a checkpoint over one of another scheme."""
    place = Path(target)
    beside = place.with_suffix(".config.json") if place.suffix else place

    def write(scheme: str) -> None:
        def progress(*_: Any) -> None:
            sys.audit("progress", str(place))

        quantize_checkpoint(source, target, scheme=scheme, force=True, progress=progress)

    def seen() -> list[str | None]:
        return [digest(place), digest(beside)]

    deaths(lambda: write("tensor"), lambda: write("channel"), seen, [str(place.parent)])


def convert(source: str, target: str) -> None:
    """Write an FP8 checkpoint in one format over itself in another."""
    place = Path(target)
    beside = place.with_suffix(".config.json") if place.suffix else place

    def write(to: ConversionName) -> None:
        def progress(*_: Any) -> None:
            sys.audit("progress", str(place))

        convert_checkpoint(source, target, to=to, force=True, progress=progress)

    def seen() -> list[str | None]:
        return [digest(place), digest(beside)]

    deaths(lambda: write("deepseek"), lambda: write("channel"), seen, [str(place.parent)])


if __name__ == "__main__":
    {"cache": cache, "checkpoint": checkpoint, "convert": convert}[sys.argv[1]](*sys.argv[2:])
