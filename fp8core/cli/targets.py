"""The devices that the command line can speak of without having them."""

from typing import Final

import typer

from fp8core.problem import HOST, Target

TARGETS: Final = (
    *("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
    *("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"),
)
"""What `explain --target` takes beside host."""
UNPROVEN: Final = "compiled and emulated, never run on hardware"
"""What is known of the kernels of devices that nobody has tried them on; docs/how-to/amd.md says how to."""


def proven(target: Target) -> bool:
    """Return whether the kernels of a device have run on one of its kind, and been tested there."""
    return target.platform == "host" or (target.platform, target.arch) == ("cuda", 90)


def target_named(name: str) -> Target:
    """Return a device that need not be here: its architecture is known, its size is that of a common one."""
    if name == "host":
        return HOST
    if name not in TARGETS:
        raise typer.BadParameter(f"needs host or one of {', '.join(TARGETS)}, got {name!r}", param_hint="--target")
    if name.startswith("sm_"):
        return Target("cuda", int(name[3:]), 0, 132, 32, 227 * 1024)
    return Target("hip", int(name[3:], 16), 0, 304, 64 if name.startswith("gfx9") else 32, 64 * 1024)
