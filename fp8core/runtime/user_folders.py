"""The folders of a user's files, as environment variables name them or platformdirs finds them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

HOME: Final = "~"
WITHOUT_HOME: Final = "~ stands for no folder: HOME is not set, there is no such user, or the path was not expanded"
"""Why nothing is read or written below ``~`` or ``~user``: it would be a folder of this name in the current folder."""


def named_by(variable: str) -> Path | None:
    """Return the path in an environment variable, or None if that is unset or empty.

    A ``~`` or ``~user`` at its beginning stands for a home folder: only shells expand it before, and only unquoted. One
    for which there is no home folder remains.
    """
    named = os.environ.get(variable)
    return Path(os.path.expanduser(named)) if named else None  # noqa: PTH111 - Path.expanduser raises


def user_folder(find: Callable[..., Path], otherwise: str) -> Path:
    """Return fp8core's folder of a kind; for a user without a home folder it begins with ``~`` and must not be used.

    Args:
        find: the function of platformdirs for this kind of folder.
        otherwise: the path below the home folder, if platformdirs finds no home folder.
    """
    try:
        return find("fp8core", appauthor=False)
    except RuntimeError:  # some releases of platformdirs return a path that begins with ~
        return Path(HOME, otherwise, "fp8core")


def is_homeless(path: Path) -> bool:
    """Return whether a path begins with ``~`` or ``~user``, so that no home folder was found or looked for."""
    return any(part.startswith(HOME) for part in path.parts[:1])
