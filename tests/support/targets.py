"""Targets of devices that need not be present: one of each architecture for which the tests compile kernels."""

from fp8core import Target

AMPERE = Target("cuda", 80, 0, 108, 32, 163 << 10)
ADA = Target("cuda", 89, 0, 142, 32, 99 << 10)
H200 = Target("cuda", 90, 0, 132, 32, 227 << 10)
BLACKWELL = Target("cuda", 100, 0, 148, 32, 227 << 10)
MI250 = Target("hip", 0x90A, 0, 104, 64, 64 << 10)
MI300 = Target("hip", 0x942, 0, 304, 64, 64 << 10)
MI350 = Target("hip", 0x950, 0, 256, 64, 160 << 10)
TARGETS = (
    AMPERE,
    ADA,
    H200,
    BLACKWELL,
    Target("cuda", 120, 0, 188, 32, 99 << 10),
    MI250,
    MI300,
    MI350,
    Target("hip", 0x1100, 0, 96, 32, 64 << 10),
    Target("hip", 0x1200, 0, 32, 32, 64 << 10),
    Target("hip", 0x1201, 0, 64, 32, 64 << 10),
)


def on(arch: int) -> Target:
    """Return the target of an architecture."""
    return next(target for target in TARGETS if target.arch == arch)
