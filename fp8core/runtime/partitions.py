"""The part of a device that a stream may use: cooperative grids and clusters need room for all their blocks at once."""

import ctypes
from typing import Final

from fp8core.runtime import device

_SM_RESOURCE: Final = 1
"""CU_DEV_RESOURCE_TYPE_SM."""
_RESOURCE_BYTES: Final = 256
"""At least the size of a CUdevResource in any release (144); its number of multiprocessors is at offset `_SM_COUNT`."""
_SM_COUNT: Final = 96


def multiprocessors(stream: int) -> int | None:
    """Return the number of multiprocessors available to a stream: those of its green context, or of its context.

    None if the driver cannot tell: before CUDA 12.5, on ROCm, and for the default streams.
    """
    if stream <= device.PER_THREAD or device.platform() != "cuda":  # a default stream, of the current context
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
    # (A context that was made from a green context is queried like any other.)
    asked = (of_green, green) if green.value else (of_context, context)
    status = asked[0](asked[1], ctypes.byref(resource), _SM_RESOURCE)
    return None if status else ctypes.c_uint32.from_buffer(resource, _SM_COUNT).value
