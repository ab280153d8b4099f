"""Views of what DLPack describes: the checks that capsules and the exchange table share."""

from typing import Any, Final

from fp8core.errors import DeviceError
from fp8core.interop import dlpack
from fp8core.interop.frameworks import Framework
from fp8core.interop.tensor import TensorView, check_aligned, check_memory, refused_dtype
from fp8core.runtime import device
from fp8core.target import HOST, Target

EXPORTER: Final = "an array that exports itself by DLPack"
WRITABLE_EXPORTER: Final = "a writable array that exports itself by DLPack"
"""What error messages say that an operand has to be."""


def target_of(device_type: int, ordinal: int, name: str) -> Target:
    """Return the target of an operand's memory, given its device as DLPack names it.

    Raises:
        DeviceError: kernels cannot be launched on that device.
    """
    if device_type in dlpack.HOST_DEVICES:
        return HOST
    if device_type in dlpack.GPU_DEVICES:
        return device.target(ordinal)
    where = dlpack.DEVICES.get(device_type, f"DLPack type {device_type}")
    raise DeviceError(f"{name} needs memory of a CUDA or ROCm device or the CPU, got {where} {ordinal}")


def view_of(found: dlpack.Content, target: Target, framework: Framework, x: Any, name: str, held: object) -> TensorView:
    """Return the view of the array ``x``, whose fields are ``found``.

    Raises:
        DTypeError: kernels do not take its dtype.
        LayoutError: it has no memory, or its address is not a multiple of its element size.
    """
    if found.dtype not in dlpack.CODES:
        raise refused_dtype(name, found.dtype)
    check_memory(found.pointer, found.shape, name)
    check_aligned(found.pointer, found.dtype, name)
    return TensorView(found.pointer, found.dtype, found.shape, found.strides, target, framework, x, held)
