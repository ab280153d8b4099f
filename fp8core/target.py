"""Targets as plain values: devices as kernels see them, in this machine or not."""

from typing import Final, Literal, NamedTuple

from fp8core.dtypes import Fp8Name

Platform = Literal["cuda", "hip", "host"]
ABSENT: Final = -1
"""The ordinal of a device that is not in this machine."""


class Target(NamedTuple):
    """A device as kernels see it.

    Examples:
        >>> import fp8core
        >>> hopper = fp8core.Target("cuda", arch=90, device=-1, multiprocessors=132, warp=32, shared_bytes=227 * 1024)
        >>> str(hopper), fp8core.capabilities(hopper)["scaled_mm_block"].able
        ('sm_90', True)
    """

    platform: Platform
    arch: int
    """90 for sm_90, 942 for gfx942 (hexadecimal digits as in 0x90a for gfx90a), 0 on the host."""
    device: int
    """The ordinal of the device; -1 (`ABSENT`) for a device that is not in this machine."""
    multiprocessors: int
    warp: int
    """The number of threads of a warp; on AMD GPUs, of a wave."""
    shared_bytes: int
    """The most shared memory of a block, in bytes."""
    model: str = ""
    """The driver's name of a device that is not in this machine, such as "NVIDIA H200", if it is known: estimates for
    models that were measured are corrected. Empty for devices of this machine."""

    def __str__(self) -> str:
        name = {"cuda": f"sm_{self.arch}", "hip": f"gfx{self.arch:x}", "host": "host"}[self.platform]
        if self.platform == "host" or self.device == ABSENT:
            return f"{name} ({self.model})" if self.model else name
        return f"{name} (device {self.device})"


def native_e4m3(target: Target) -> Fp8Name:
    """Return the E4M3 format that a device multiplies: fnuz on MI300 (gfx942), OCP's on all others."""
    return "float8_e4m3fnuz" if target.platform == "hip" and target.arch == 0x942 else "float8_e4m3fn"


HOST: Final = Target("host", 0, 0, 0, 1, 0)
"""This machine's processor and memory, on which NumPy runs."""
