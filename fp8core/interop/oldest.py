"""The oldest releases of the frameworks that have a package of their own here."""

import re
from importlib import import_module
from typing import Final

OLDEST: Final = {"torch": "2.11", "jax": "0.10.2", "transformers": "5.17"}
"""The first releases that the tests ran with. Arrays of older ones are taken, too, but not by `fp8core.torch`."""


def require(framework: str) -> None:
    """Check a framework's version before what older releases do not have is imported from it.

    Raises:
        ImportError: it is not installed, or older than any that the tests ran with.
    """
    version: str = import_module(framework).__version__
    if _numbers(version) < _numbers(OLDEST[framework]):
        raise ImportError(f"fp8core.{framework} needs {framework} {OLDEST[framework]} or later, got {version}")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (2, 13, 0) of 2.13.0a0+cpu."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
