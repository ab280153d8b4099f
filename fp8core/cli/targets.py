"""The devices that the command line can speak of without having them."""

from typing import Final

import typer

from fp8core.ops.targets import TARGETS as KNOWN
from fp8core.ops.targets import target_of
from fp8core.problem import Target

TARGETS: Final = tuple(name for name in KNOWN if name != "host")
"""What `explain --target` takes beside host."""
UNPROVEN: Final = "compiled and emulated, never run on hardware"
"""What is known of the kernels of devices that nobody has tried them on; docs/how-to/amd.md says how to."""


def proven(target: Target) -> bool:
    """Return whether the kernels of a device have run on one of its kind, and been tested there."""
    return target.platform == "host" or (target.platform, target.arch) == ("cuda", 90)


def target_named(name: str) -> Target:
    """Return a device that need not be here: its architecture is known, its size is that of a common one."""
    if name not in KNOWN:
        raise typer.BadParameter(f"needs host or one of {', '.join(TARGETS)}, got {name!r}", param_hint="--target")
    return target_of(name)
