"""Device sources: finds them, and flattens each into one compilable text.

The cache on disk is keyed by the text that is compiled, so all headers of the project are inlined into it.
"""

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

from fp8core.errors import BackendError
from fp8core.target import Platform

ENTRIES: Final[dict[Platform, tuple[str, str]]] = {"cuda": ("cuda_src", ".cu"), "hip": ("hip_src", ".hip")}
"""The folder and the suffix of each platform's entries."""

_INCLUDE: Final = re.compile(r'\s*#\s*include\s*"([^"]+)"')
_ONCE: Final = re.compile(r"\s*#\s*pragma\s+once\b")


@cache
def root() -> Path:
    """Return the folder that holds ``cuda_src`` and ``hip_src``: the checkout's, or the wheel's.

    Raises:
        BackendError: the installation has no device sources, and the message lists the folders searched; or it is
            imported from an archive.
    """
    package = Path(__file__).resolve().parents[1]
    places = (package / "_sources", package.parent)
    for place in places:
        if all((place / folder).is_dir() for folder, _ in ENTRIES.values()):
            return place
    if not package.is_dir():
        raise BackendError(
            f"fp8core needs to be installed in a folder, as it reads device sources there, got {package}"
        )
    raise BackendError(f"no device sources (cuda_src, hip_src) in {' or '.join(map(str, places))}: reinstall fp8core")


def names(platform: Platform) -> tuple[str, ...]:
    """Return the names of a platform's sources, as `flatten` takes them, in alphabetical order: "gemm/sm90/decode"."""
    folder, suffix = ENTRIES[platform]
    top = root() / folder
    found = (path.relative_to(top).with_suffix("").as_posix() for path in top.rglob(f"*{suffix}"))
    return tuple(sorted((*found, *portable())))


@cache
def portable() -> tuple[str, ...]:
    """Return the names in cuda_src/entries.def: kernels with one source for both platforms."""
    lines = (root() / "cuda_src" / "entries.def").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def entry_text(platform: Platform, name: str) -> str:
    """Return the text of a portable entry: it includes the platform's header, then cuda_src/<name>.cuh, the kernel."""
    up = "../" * name.count("/")
    body = f"{up}{name}.cuh" if platform == "cuda" else f"{up}../cuda_src/{name}.cuh"
    return f'#include "{up}platform.cuh"\n#include "{body}"\n'


@cache
def flatten(platform: Platform, source: str) -> str:
    """Return the text of ``cuda_src/<source>.cu`` or ``hip_src/<source>.hip`` with the project's headers inlined.

    A portable entry (`portable`) has no such file: its text is `entry_text`.

    ``#include "x"`` is resolved relative to the including file. Every header is inlined once, where it is first
    included, so an include must not be under an ``#if``. ``#line`` directives keep file and line in the compiler's
    messages correct. ``#include <x>`` is left alone.

    Raises:
        BackendError: a file is missing, is outside the source folders, or includes itself.
    """
    folder, suffix = ENTRIES[platform]
    name = f"{folder}/{source}{suffix}"
    if source in portable():
        return "".join(_Flattener(root().resolve()).lines(name, entry_text(platform, source), ()))
    return flatten_file(root(), name)


def flatten_file(base: Path, name: str) -> str:
    """Return the text of the file ``base / name``, flattened as in `flatten`; names are relative to ``base``."""
    return "".join(_Flattener(base.resolve()).inline(name, ()))


@cache
def digest() -> str:
    """Return the SHA-256, in hexadecimal, of the names and texts of all device sources."""
    folders = (root() / folder for folder, _ in ENTRIES.values())
    return digest_of(root(), (path for each in folders for path in sorted(p for p in each.rglob("*") if p.is_file())))


def digest_of(base: Path, files: Iterable[Path]) -> str:
    """Return the SHA-256, in hexadecimal, of the texts of files and their names relative to ``base``."""
    state = hashlib.sha256()
    for path in files:
        text = path.read_bytes()
        state.update(f"{path.relative_to(base).as_posix()}\0{len(text)}\0".encode() + text)
    return state.hexdigest()


class _Flattener:
    """One flattening: the folder that names are relative to, and the files inlined so far."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.seen: set[str] = set()

    def inline(self, name: str, including: tuple[str, ...]) -> list[str]:
        """Return the lines of the file ``name``; ``including`` is the chain of files that include it."""
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
        """Return the flattened lines of ``text``, the text of the file ``name``."""
        lines = [f'#line 1 "{name}"\n']
        for number, line in enumerate(text.splitlines(), 1):
            include = _INCLUDE.match(line)
            if include:
                lines += self.inline(self.resolve(name, include[1]), (*including, name))
                lines.append(f'#line {number + 1} "{name}"\n')
            else:
                # The compiler would warn of a #pragma once in its main file.
                lines.append("\n" if _ONCE.match(line) else f"{line}\n")
        return lines

    def resolve(self, name: str, target: str) -> str:
        """Return the name, relative to the base, of the file that the file ``name`` includes as ``target``."""
        path = (self.base / name).parent.joinpath(target).resolve()
        if not path.is_relative_to(self.base):
            raise BackendError(f"{name} includes {target!r}, which lies outside {self.base}")
        return path.relative_to(self.base).as_posix()
