"""Targets by name, for `explain` and `capabilities`; this machine need not have the device."""

from typing import Final

from fp8core.core import checks
from fp8core.errors import DeviceError
from fp8core.interop.names import type_name
from fp8core.runtime import device as devices
from fp8core.target import ABSENT, HOST, Target

KIB: Final = 1024
TARGETS: Final[dict[str, Target]] = {
    "host": HOST,
    "sm_80": Target("cuda", 80, ABSENT, 108, 32, 163 * KIB),
    "sm_86": Target("cuda", 86, ABSENT, 84, 32, 99 * KIB),
    "sm_89": Target("cuda", 89, ABSENT, 142, 32, 99 * KIB),
    "sm_90": Target("cuda", 90, ABSENT, 132, 32, 227 * KIB),
    "sm_100": Target("cuda", 100, ABSENT, 148, 32, 227 * KIB),
    "sm_120": Target("cuda", 120, ABSENT, 188, 32, 99 * KIB),
    "gfx90a": Target("hip", 0x90A, ABSENT, 104, 64, 64 * KIB),
    "gfx942": Target("hip", 0x942, ABSENT, 304, 64, 64 * KIB),
    "gfx950": Target("hip", 0x950, ABSENT, 256, 64, 160 * KIB),
    "gfx1100": Target("hip", 0x1100, ABSENT, 96, 32, 64 * KIB),
    "gfx1201": Target("hip", 0x1201, ABSENT, 64, 32, 64 * KIB),
}
"""The target of each architecture, with multiprocessors and shared memory of a model in `MODELS`."""
MODELS: Final = {
    "sm_80": "A100",
    "sm_86": "A40",
    "sm_89": "L40S",
    "sm_90": "H100, H200",
    "sm_100": "B200",
    "sm_120": "RTX PRO 6000",
    "gfx90a": "MI250, one die",
    "gfx942": "MI300X",
    "gfx950": "MI355X",
    "gfx1100": "RX 7900 XTX",
    "gfx1201": "RX 9070 XT",
}
"""By name of the architecture: the model of GPU, or models, whose size its target in `TARGETS` has."""

WARPS: Final = {"cuda": (32,), "hip": (32, 64)}
"""By platform: the threads that a warp can have."""
LEAST: Final = {"arch": 1, "device": ABSENT, "multiprocessors": 1, "shared_bytes": 48 * KIB}
"""By field of a target: the least number that a GPU has."""


def target_of(device: int | str | Target | None, name: str = "device") -> Target:
    """Return the target for a device that was given by ordinal or name.

    Args:
        device: the ordinal of a GPU of this machine, a name in `TARGETS` (then the first such device of this machine,
            if it has one), a target, or None for the current GPU (the host if there is no GPU).
        name: the name of the argument in error messages.

    Raises:
        DeviceError: this machine has no such device, the name is not in `TARGETS`, no device can be like the target, or
            ``device`` is none of these.
    """
    if isinstance(device, Target):
        _check_target(device, name)
        return device
    if isinstance(device, str):
        if device not in TARGETS:
            raise DeviceError(f"{name} needs {targets_and_models()}, got {device!r}")
        meant = TARGETS[device]
        if meant == HOST:  # the driver is not asked: after that no forked child could use a GPU
            return meant
        here = (devices.target(ordinal) for ordinal in range(devices.count()))
        return next((it for it in here if (it.platform, it.arch) == (meant.platform, meant.arch)), meant)
    if device is None:
        return devices.target(devices.current()) if devices.count() else HOST
    ordinal = checks.whole_number(device)
    if ordinal is None:
        raise DeviceError(f"{name} needs a Target, its name or the ordinal of a GPU, got {type_name(device)}")
    if not devices.count():
        raise DeviceError(f"{name} needs a GPU, got {device} on a machine without one: {devices.why_none()}")
    return devices.target(ordinal)


def _check_target(target: Target, name: str) -> None:
    """Refuse a target that no device is like, for which no kernel could be planned."""
    if target == HOST:
        return
    if not checks.is_one_of(target.platform, WARPS):
        raise DeviceError(f"{name} needs platform {' or '.join(WARPS)}, got {target.platform!r}")
    for field, least in LEAST.items():
        number = getattr(target, field)
        if not isinstance(number, int) or number < least:
            raise DeviceError(f"{name} needs {field} to be a whole number from {least}, got {number!r}")
    if target.warp not in WARPS[target.platform]:
        warps = " or ".join(map(str, WARPS[target.platform]))
        raise DeviceError(f"{name} needs warp {warps} on {target.platform}, got {target.warp!r}")


def targets_and_models(*, gpus: bool = False) -> str:
    """Return the names of targets, or of GPUs alone, for an error message, each with its models, which users know."""
    chosen = [name for name in TARGETS if name != "host" or not gpus]
    names = [f"{name} ({MODELS[name]})" if name in MODELS else name for name in chosen]
    return f"{', '.join(names[:-1])} or {names[-1]}"
