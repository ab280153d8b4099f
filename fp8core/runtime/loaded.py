"""Finds the shared libraries that the process has mapped, to detect a second copy of the HIP runtime on ROCm.

The wheels of PyTorch and TheRock contain a HIP runtime. Two copies in one process share neither streams nor memory:
their null streams are not ordered with each other, and a stream of one is invalid in the other
(hipErrorContextIsDestroyed).
"""

import re
from functools import cache
from pathlib import Path
from typing import Final

from fp8core.errors import DeviceError

MAPS: Final = Path("/proc/self/maps")
HIP_RUNTIME: Final = "libamdhip64"


def mapped(stem: str) -> tuple[Path, ...]:
    """Return the distinct files ``<stem>.so*`` that the process has mapped, in the order of their addresses.

    Empty if the system does not list them.
    """
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    name = re.compile(rf"{re.escape(stem)}\.so(\.\d+)*")
    paths = (line.split(maxsplit=5)[5].removesuffix(" (deleted)") for line in lines if line.count("/"))
    return tuple(dict.fromkeys(path for text in paths if name.fullmatch((path := Path(text)).name)))


def hip_runtime() -> Path | str | None:
    """Return the HIP runtime that is mapped; None if there is none, and an error message if there are several."""
    found = mapped(HIP_RUNTIME)
    if len(found) > 1:
        return (
            f"a process needs one HIP runtime, got {len(found)}: {', '.join(map(str, found))}"
            " (import torch before fp8core and CuPy, or install all of them for one ROCm)"
        )
    return found[0] if found else None


@cache
def refuse_second_hip_runtime() -> None:
    """Raise DeviceError if several HIP runtimes are mapped: torch may have mapped a second one after CuPy's."""
    found = hip_runtime()
    if isinstance(found, str):
        raise DeviceError(found)
