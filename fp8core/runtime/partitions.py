"""The part of a device that a stream has: a cooperative grid or a cluster needs room for all of its blocks at once."""

import ctypes
from typing import Final

from fp8core.errors import BackendError
from fp8core.runtime import device

NOT_ASKED: Final = -1
"""In place of a status: the driver was not asked, as the launch breaks a rule that is known."""
NOT_CAPTURED: Final = -2
"""In place of a status: a cooperative launch on a stream that is captured, which not every ROCm can record."""
TOO_LARGE: Final = (720, 912, NOT_CAPTURED)
"""Where another kernel takes a cooperative grid's, or a cluster's, place: what the driver answers where not all blocks
find a place at once, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE (hipErrorCooperativeLaunchTooLarge) and
CUDA_ERROR_INVALID_CLUSTER_SIZE, and `NOT_CAPTURED`."""
_SM_RESOURCE: Final = 1
"""CU_DEV_RESOURCE_TYPE_SM."""
_RESOURCE_BYTES: Final = 256
"""At least what a CUdevResource of any release takes (144); its count of multiprocessors stands at `_SM_COUNT`."""
_SM_COUNT: Final = 96


class LaunchError(BackendError):
    """A launch that the driver refused; nothing ran."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def multiprocessors(stream: int) -> int | None:
    """Return how many multiprocessors work on a stream can have: those of its green context, or of its context.

    None where the driver cannot tell: before CUDA 12.5, on ROCm, and for the default streams.
    """
    if stream <= device.PER_THREAD or device.platform() != "cuda":  # a default one, of whatever context is current
        return None
    context, green = ctypes.c_void_p(), ctypes.c_void_p()
    resource = ctypes.create_string_buffer(_RESOURCE_BYTES)
    try:
        of_stream, of_green, of_context = (
            getattr(device.driver(), name)
            for name in ("cuStreamGetCtx_v2", "cuGreenCtxGetDevResource", "cuCtxGetDevResource")
        )
    except AttributeError:
        return None
    device.check(
        of_stream(ctypes.c_void_p(stream), ctypes.byref(context), ctypes.byref(green)),
        "cuStreamGetCtx",
        f"stream {stream:#x}",
    )
    # (A context that was made of a green one is asked like any other.)
    asked = (of_green, green) if green.value else (of_context, context)
    status = asked[0](asked[1], ctypes.byref(resource), _SM_RESOURCE)
    return None if status else ctypes.c_uint32.from_buffer(resource, _SM_COUNT).value
