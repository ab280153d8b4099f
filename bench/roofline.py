"""The floor that times are compared with: the least time that an H200 takes for a call's bytes or its operations."""

from typing import Final, NamedTuple

BANDWIDTH: Final = 4.3e12
"""Bytes a second, read plus written, that a copy between buffers in the memory of an H200 moves."""
RATE: Final = 1.55e15
"""Operations a second of its FP8 tensor cores on random data."""


class Roofline(NamedTuple):
    """The fewest bytes and operations that a call must spend."""

    bytes: int
    flops: int = 0

    def floor(self, bandwidth: float = BANDWIDTH, rate: float = RATE) -> float:
        """Return the microseconds that no implementation can beat, at bytes and operations a second."""
        return max(self.bytes / bandwidth, self.flops / rate) * 1e6
