"""The folders of a user's files, as platformdirs finds them."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

HOME: Final = "~"
WITHOUT_HOME: Final = "~ stands for no folder: HOME is not set, or the path was not expanded"
"""Why nothing is read or written below `HOME`: it would be a folder named ``~`` in the current folder."""


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
    """Return whether a path begins with ``~``, as the user has no home folder."""
    return path.parts[:1] == (HOME,)
