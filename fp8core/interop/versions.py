"""The oldest supported releases of the frameworks that have a sub-package of fp8core."""

import re
from importlib import import_module
from typing import Final

OLDEST: Final = {"torch": "2.11", "jax": "0.10.2", "transformers": "5.17"}
"""The oldest releases that the tests ran with. `fp8core.torch` and the others refuse older ones."""
OLDEST_JAX_ARRAYS: Final = "0.8"
"""The oldest release of JAX whose arrays are accepted. What `jax.dlpack.from_dlpack` does in older ones: 0.6.1 to 0.7.1
read transposed memory as row-major, without an error; 0.7.2 refuses it; 0.5.1 and older know no FP8."""


def require_version(framework: str) -> None:
    """Check a framework's version, before importing from it what older releases lack.

    Raises:
        ImportError: the framework is not installed, or is older than any release that the tests ran with.
    """
    version: str = import_module(framework).__version__
    if is_older(version, OLDEST[framework]):
        raise ImportError(f"fp8core.{framework} needs {framework} {OLDEST[framework]} or later, got {version}")


def is_older(version: str, oldest: str) -> bool:
    """Return whether a version is older than another one, by their leading numbers."""
    return _numbers(version) < _numbers(oldest)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for 2.13.0a0+cpu."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
