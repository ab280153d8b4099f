"""The devices that the command line can explain without having them."""

from typing import Final

from fp8core.cli.arguments import bad_value
from fp8core.ops.targets import TARGETS, target_of, targets_and_models
from fp8core.target import Target

GPUS: Final = tuple(name for name in TARGETS if name != "host")
"""The names of the targets that are GPUs."""
UNPROVEN: Final = "compiled and emulated, never run on hardware"
"""The state of kernels that nobody has run on their device yet; docs/how-to/amd.md says how to test them."""


def proven(target: Target) -> bool:
    """Return whether the kernels of a device have been tested on a device of its kind."""
    return target.platform == "host" or (target.platform, target.arch) == ("cuda", 90)


def target_named(name: str) -> Target:
    """Return a device by name, which need not be present: it has the size of a common model of its architecture."""
    if name not in TARGETS:
        raise bad_value("--target", f"needs {targets_and_models()}, got {name!r}")
    return target_of(name)
