"""Where a user's own files are, as platformdirs finds it."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

HOME: Final = "~"
WITHOUT_HOME: Final = "~ stands for no folder: HOME is not set, or the path was not expanded"
"""Why nothing is read or written below `HOME`, which would be a folder of that name in the current one."""


def user_folder(find: Callable[..., Path], otherwise: str) -> Path:
    """Return fp8core's folder of a kind; that of a user without a home folder begins with ``~``, and is not to be used.

    Args:
        find: of platformdirs.
        otherwise: the folder below a home folder.
    """
    try:
        return find("fp8core", appauthor=False)
    except RuntimeError:  # some releases of platformdirs return a path that begins with ~
        return Path(HOME, otherwise, "fp8core")


def is_homeless(path: Path) -> bool:
    """Return whether a path lies in a home folder that there is none of."""
    return path.parts[:1] == (HOME,)
