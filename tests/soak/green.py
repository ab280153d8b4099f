"""A stream of a green context, which has some of the device's multiprocessors, through the driver's own functions."""

import ctypes
from typing import Any

SM_RESOURCE = 1
DEFAULT_STREAM = 1
NON_BLOCKING = 1
ROOM = 256
"""More bytes than a CUdevResource has (144)."""


def stream(ordinal: int, multiprocessors: int) -> int | str:
    """Return the address of a stream of a new green context, or why there is none; the context must be current."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        make = driver.cuGreenCtxCreate, driver.cuGreenCtxStreamCreate, driver.cuDevSmResourceSplitByCount
    except (OSError, AttributeError) as error:
        return f"no green contexts: {error}"
    create, create_stream, split = make
    device, count = ctypes.c_int(), ctypes.c_uint(1)
    whole, part, rest = (ctypes.create_string_buffer(ROOM) for _ in range(3))
    description, context, found = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    calls: list[tuple[str, Any]] = [
        ("cuDeviceGet", lambda: driver.cuDeviceGet(ctypes.byref(device), ordinal)),
        ("cuDeviceGetDevResource", lambda: driver.cuDeviceGetDevResource(device, whole, SM_RESOURCE)),
        ("cuDevSmResourceSplitByCount", lambda: split(part, ctypes.byref(count), whole, rest, 0, multiprocessors)),
        ("cuDevResourceGenerateDesc", lambda: driver.cuDevResourceGenerateDesc(ctypes.byref(description), part, 1)),
        ("cuGreenCtxCreate", lambda: create(ctypes.byref(context), description, device, DEFAULT_STREAM)),
        ("cuGreenCtxStreamCreate", lambda: create_stream(ctypes.byref(found), context, NON_BLOCKING, 0)),
    ]
    for name, call in calls:
        if status := call():
            return f"no green contexts: {name} gave {status}"
    return int(found.value or 0)
