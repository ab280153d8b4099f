"""The ctypes structures of engine.h: a launch, the arrays that it may touch, and the schedule of its threads."""

import ctypes
from typing import Literal, NamedTuple


class Array(ctypes.Structure):
    """EmulatedArray of engine.h."""

    _fields_ = (("address", ctypes.c_size_t), ("bytes", ctypes.c_uint64), ("writable", ctypes.c_int32))


class Launch(ctypes.Structure):
    """EmulatedLaunch of engine.h."""

    _fields_ = (
        ("call", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("warp", ctypes.c_uint32),
        ("schedule", ctypes.c_uint32 * 3),
        ("together", ctypes.c_int32),
        ("flush_subnormals", ctypes.c_int32),
        ("reads_need_fences", ctypes.c_int32),
        ("arrays", ctypes.c_void_p),
        ("array_count", ctypes.c_int32),
        ("report", ctypes.c_void_p),
        ("report_bytes", ctypes.c_int32),
        ("site", ctypes.c_size_t),
    )


class Schedule(NamedTuple):
    """The order in which threads run, and when asynchronous operations happen (EmulatedSchedule of engine.h)."""

    order: Literal["next", "first", "last", "groups", "any"] = "next"
    """Which of the threads that can run is next: the following one; always the first (a block's loaders are far ahead),
    or the last; the first in an order of groups of 128 threads that the seed draws; or a random one."""
    landing: Literal["at once", "late", "sometime"] = "at once"
    """When copies land and stores read: when they are issued, when no thread can run, or at a random time between."""
    seed: int = 0

    def numbers(self) -> tuple[int, int, int]:
        """Return the fields of the engine's EmulatedSchedule."""
        orders, landings = ("next", "first", "last", "groups", "any"), ("at once", "late", "sometime")
        return orders.index(self.order), landings.index(self.landing), self.seed

    def __str__(self) -> str:
        return f"{self.order}, {self.landing}, seed {self.seed}"
