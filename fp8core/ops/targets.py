"""Targets by name, for `explain` and `capabilities`; this machine need not have the device."""

from typing import Final

from fp8core.errors import DeviceError
from fp8core.problem import ABSENT, HOST, Target
from fp8core.runtime import device as devices

KIB: Final = 1024
TARGETS: Final[dict[str, Target]] = {
    "host": HOST,
    "sm_80": Target("cuda", 80, ABSENT, 108, 32, 163 * KIB),  # A100
    "sm_86": Target("cuda", 86, ABSENT, 84, 32, 99 * KIB),  # A40
    "sm_89": Target("cuda", 89, ABSENT, 142, 32, 99 * KIB),  # L40S
    "sm_90": Target("cuda", 90, ABSENT, 132, 32, 227 * KIB),  # H100, H200
    "sm_100": Target("cuda", 100, ABSENT, 148, 32, 227 * KIB),  # B200
    "sm_120": Target("cuda", 120, ABSENT, 188, 32, 99 * KIB),  # RTX PRO 6000
    "gfx90a": Target("hip", 0x90A, ABSENT, 104, 64, 64 * KIB),  # MI250, one die
    "gfx942": Target("hip", 0x942, ABSENT, 304, 64, 64 * KIB),  # MI300X
    "gfx950": Target("hip", 0x950, ABSENT, 256, 64, 160 * KIB),  # MI355X
    "gfx1100": Target("hip", 0x1100, ABSENT, 96, 32, 64 * KIB),  # RX 7900 XTX
    "gfx1201": Target("hip", 0x1201, ABSENT, 64, 32, 64 * KIB),  # RX 9070 XT
}
"""The target of each architecture, with multiprocessors and shared memory of the device named in the comment."""


def target_of(device: int | str | Target | None, name: str = "device") -> Target:
    """Return the target for a device that was given by ordinal or name.

    Args:
        device: the ordinal of a GPU of this machine, a name in `TARGETS` (then the first such device of this machine,
            if it has one), a target, or None for the current GPU (the host if there is no GPU).
        name: the name of the argument in error messages.

    Raises:
        DeviceError: this machine has no such device, or the name is not in `TARGETS`.
    """
    if isinstance(device, Target):
        return device
    if isinstance(device, str):
        if device not in TARGETS:
            raise DeviceError(f"{name} needs one of {', '.join(TARGETS)}, got {device!r}")
        meant = TARGETS[device]
        here = (devices.target(ordinal) for ordinal in range(devices.count()))
        return next((it for it in here if (it.platform, it.arch) == (meant.platform, meant.arch)), meant)
    if devices.count() == 0:
        if device is not None:
            raise DeviceError(f"{name} needs a GPU, got {device} on a machine without one: {devices.why_none()}")
        return HOST
    return devices.target(devices.current() if device is None else device)
