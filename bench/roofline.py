"""The floor of a call: the least time that an H200 needs for the call's bytes or its operations."""

from typing import Final, NamedTuple

BANDWIDTH: Final = 4.3e12
"""Bytes per second, read plus written, of a copy between buffers in the memory of an H200."""
RATE: Final = 1.55e15
"""Operations per second of the FP8 tensor cores of an H200 on random data."""


class Roofline(NamedTuple):
    """The fewest bytes and operations that a call needs."""

    bytes: int
    flops: int = 0

    def floor(self, bandwidth: float = BANDWIDTH, rate: float = RATE) -> float:
        """Return the least microseconds at these rates, in bytes and operations per second."""
        return max(self.bytes / bandwidth, self.flops / rate) * 1e6
