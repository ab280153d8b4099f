"""Which shared libraries the process has mapped: on ROCm a second copy of the HIP runtime is a danger of its own.

PyTorch's and TheRock's wheels bring a HIP runtime with them. Two in one process share neither streams nor memory: their
null streams are not ordered with each other, and a stream of one fails in the other (hipErrorContextIsDestroyed).
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

    Empty where the system has no list of them.
    """
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    name = re.compile(rf"{re.escape(stem)}\.so(\.\d+)*")
    paths = (line.split(maxsplit=5)[5].removesuffix(" (deleted)") for line in lines if line.count("/"))
    return tuple(dict.fromkeys(path for text in paths if name.fullmatch((path := Path(text)).name)))


def hip_runtime() -> Path | str | None:
    """Return the HIP runtime that is mapped, a refusal in words where there are several, None where there is none."""
    found = mapped(HIP_RUNTIME)
    if len(found) > 1:
        return (
            f"a process needs one HIP runtime, got {len(found)}: {', '.join(map(str, found))}"
            " (import torch before fp8core and CuPy, or install all of them for one ROCm)"
        )
    return found[0] if found else None


@cache
def refuse_second_hip_runtime() -> None:
    """Raise DeviceError where several HIP runtimes are mapped, which may have become true since the first call."""
    found = hip_runtime()
    if isinstance(found, str):
        raise DeviceError(found)
