"""Patterns over the names of modules: checks, matching, and suggestions for patterns that match nothing."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from glob import escape
from typing import Any, Final, NamedTuple

from fp8core.errors import CheckpointError

ALWAYS_KNOWN: Final = "lm_head"
"""A module that configurations name even if a checkpoint with tied weights does not store it: it may be excluded."""


class Selection(NamedTuple):
    """A selection of modules: glob patterns, or regular expressions after ``re:``, over names without ".weight"."""

    include: tuple[str, ...] | None
    exclude: tuple[str, ...]

    def included_by(self, module: str) -> str | None:
        """Return the pattern of include that matches a module, or None."""
        return _first(module, self.include or ())

    def excluded_by(self, module: str) -> str | None:
        """Return the pattern of exclude that matches a module, or None."""
        return _first(module, self.exclude)


def selection(include: Sequence[str] | None, exclude: Sequence[str], modules: Iterable[str]) -> Selection:
    """Return the selection among the modules of a checkpoint or model.

    Raises:
        CheckpointError: include or exclude is not a list of patterns, a regular expression does not compile, or a
            pattern matches no module.
    """
    modules = set(modules)
    picked = Selection(None if include is None else patterns_of(include, "include"), patterns_of(exclude, "exclude"))
    for operand, patterns, known in (
        ("include", picked.include or (), modules),
        ("exclude", picked.exclude, {*modules, ALWAYS_KNOWN}),
    ):
        for pattern in patterns:
            check_pattern(pattern, operand)
            if not any(matches(module, pattern) for module in known):
                raise CheckpointError(
                    f"{operand} needs patterns that match a module, got '{pattern}', which matches none"
                    f"{_meant(pattern, modules)}"
                )
    return picked


def patterns_of(patterns: Any, operand: str) -> tuple[str, ...]:
    """Return a list of patterns as a tuple; a string, which would be a list of its letters, is refused.

    Raises:
        CheckpointError: patterns is not a list of strings.
    """
    listed = tuple(patterns) if isinstance(patterns, Iterable) and not isinstance(patterns, str) else (None,)
    if not all(isinstance(pattern, str) for pattern in listed):
        raise CheckpointError(f"{operand} needs a list of patterns, got {patterns!r}")
    return listed


def check_pattern(pattern: str, operand: str) -> None:
    """Refuse a regular expression that does not compile.

    Raises:
        CheckpointError: the expression does not compile.
    """
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise CheckpointError(f"{operand} needs regular expressions, got '{pattern}': {error}") from error


def matches(module: str, pattern: str) -> bool:
    """Return whether a pattern matches a module's name: a glob the whole name, a regular expression its beginning."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatchcase(module, pattern)


def only(module: str) -> str:
    """Return the pattern that matches this name and no other."""
    return f"[r]{escape(module[1:])}" if module.startswith("re:") else escape(module)


def _first(module: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if matches(module, pattern)), None)


def _meant(pattern: str, modules: set[str]) -> str:
    """Return a suggestion for a pattern that matches nothing: a wider pattern, or else similar names."""
    wider = [f"re:.*{pattern[3:]}"] if pattern.startswith("re:") else [f"*{pattern}", f"*{pattern}*"]
    for one in wider:
        found = sorted(module for module in modules if matches(module, one))
        if found:
            return f"; '{one}' matches {len(found)}, such as {found[0]}"
    words = {part for module in modules for part in (module, module.rpartition(".")[2])}
    close = get_close_matches(pattern.strip("*").rpartition(".")[2], sorted(words), n=3, cutoff=0.5)
    return f"; similar names are {', '.join(close)}" if close else ""
