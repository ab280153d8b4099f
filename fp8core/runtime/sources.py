"""Device sources: where they are, and one compilable text of each.

CuPy's disk cache keys on the text that it is given and never sees a header, so every header of ours is
inlined before a text leaves here.
"""

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Final

from fp8core.errors import BackendError
from fp8core.problem import Platform

ENTRIES: Final[dict[Platform, tuple[str, str]]] = {"cuda": ("cuda_src", ".cu"), "hip": ("hip_src", ".hip")}
"""The folder and the suffix of each platform's entries."""

_INCLUDE: Final = re.compile(r'\s*#\s*include\s*"([^"]+)"')
_ONCE: Final = re.compile(r"\s*#\s*pragma\s+once\b")


@cache
def root() -> Path:
    """Return the folder that holds ``cuda_src`` and ``hip_src``: the checkout's, or the wheel's.

    Raises:
        BackendError: the installation has no device sources; the message holds the places looked at.
    """
    package = Path(__file__).resolve().parents[1]
    places = (package / "_sources", package.parent)
    for place in places:
        if all((place / folder).is_dir() for folder, _ in ENTRIES.values()):
            return place
    raise BackendError(f"no device sources (cuda_src, hip_src) in {' or '.join(map(str, places))}: reinstall fp8core")


def names(platform: Platform) -> tuple[str, ...]:
    """Return the names of a platform's sources, as `flatten` takes them, in alphabetical order: "gemm/sm90/decode"."""
    folder, suffix = ENTRIES[platform]
    top = root() / folder
    found = (path.relative_to(top).with_suffix("").as_posix() for path in top.rglob(f"*{suffix}"))
    return tuple(sorted((*found, *portable())))


@cache
def portable() -> tuple[str, ...]:
    """Return the names in cuda_src/entries.def: kernels that are one text for both platforms."""
    lines = (root() / "cuda_src" / "entries.def").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def entry_text(platform: Platform, name: str) -> str:
    """Return the text of a portable entry: the platform's header, then cuda_src/<name>.cuh, which has the kernel."""
    up = "../" * name.count("/")
    body = f"{up}{name}.cuh" if platform == "cuda" else f"{up}../cuda_src/{name}.cuh"
    return f'#include "{up}platform.cuh"\n#include "{body}"\n'


@cache
def flatten(platform: Platform, source: str) -> str:
    """Return the text of ``cuda_src/<source>.cu`` or ``hip_src/<source>.hip`` with our headers inlined.

    A portable entry (`portable`) has no such file: its text is `entry_text`.

    ``#include "x"`` is resolved beside the file that says it, and every header comes once, where it is first
    included (so an include must not stand under an ``#if``). ``#line`` keeps the compiler's messages true.
    ``#include <x>`` is left alone.

    Raises:
        BackendError: a file is missing, lies outside the source folders, or includes itself.
    """
    folder, suffix = ENTRIES[platform]
    name = f"{folder}/{source}{suffix}"
    if source in portable():
        return "".join(_Flattener(root().resolve()).lines(name, entry_text(platform, source), ()))
    return flatten_file(root(), name)


def flatten_file(base: Path, name: str) -> str:
    """Return the text of the file ``base / name`` as `flatten` does; names in it are relative to ``base``."""
    return "".join(_Flattener(base.resolve()).inline(name, ()))


@cache
def digest() -> str:
    """Return the SHA-256, in hexadecimal, of every device source's name and text: a key of what they compile to."""
    state = hashlib.sha256()
    for folder, _ in ENTRIES.values():
        for path in sorted(p for p in (root() / folder).rglob("*") if p.is_file()):
            text = path.read_bytes()
            state.update(f"{path.relative_to(root()).as_posix()}\0{len(text)}\0".encode() + text)
    return state.hexdigest()


class _Flattener:
    """One flattening: the folder that names are relative to, and the files inlined so far."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.seen: set[str] = set()

    def inline(self, name: str, including: tuple[str, ...]) -> list[str]:
        """Return the lines of the file ``name``, which the files ``including`` led to."""
        chain = " -> ".join((*including, name))
        if name in including:
            raise BackendError(f"device sources include each other in a circle: {chain}")
        if name in self.seen:
            return []
        self.seen.add(name)
        try:
            text = (self.base / name).read_text(encoding="utf-8")
        except OSError as error:
            raise BackendError(f"cannot read the device source {chain} in {self.base}: {error.strerror}") from error
        return self.lines(name, text, including)

    def lines(self, name: str, text: str, including: tuple[str, ...]) -> list[str]:
        """Return the lines of ``text``, which is that of the file ``name``."""
        lines = [f'#line 1 "{name}"\n']
        for number, line in enumerate(text.splitlines(), 1):
            include = _INCLUDE.match(line)
            if include:
                lines += self.inline(self.resolve(name, include[1]), (*including, name))
                lines.append(f'#line {number + 1} "{name}"\n')
            else:
                # A #pragma once in what becomes the main file would only be warned of.
                lines.append("\n" if _ONCE.match(line) else f"{line}\n")
        return lines

    def resolve(self, name: str, target: str) -> str:
        """Return the name of what the file ``name`` includes as ``target``."""
        path = (self.base / name).parent.joinpath(target).resolve()
        if not path.is_relative_to(self.base):
            raise BackendError(f"{name} includes {target!r}, which lies outside {self.base}")
        return path.relative_to(self.base).as_posix()
