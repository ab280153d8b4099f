"""The floor of a call: the least time that a GPU needs for the call's bytes or its operations."""

from functools import cache
from typing import Final, NamedTuple

from fp8core.runtime import device


class Rates(NamedTuple):
    """What a model of GPU reaches."""

    bandwidth: float
    """Bytes per second, read plus written, of a copy between buffers in its memory."""
    flops: float
    """Operations per second of its FP8 tensor cores on random data."""

    @property
    def memory(self) -> str:
        """The bandwidth as text."""
        return f"{self.bandwidth / 1e12:.1f} TB/s"


H200: Final = "NVIDIA H200"
H100: Final = "NVIDIA H100 80GB HBM3"
RATES: Final = {H200: Rates(4.3e12, 1.55e15), H100: Rates(3.0e12, 1.55e15)}
"""By the name of a GPU: both have the same multiprocessors, clock and limit of power."""


def rates(gpu: str | None) -> Rates:
    """Return the rates of a GPU; one that is not in `RATES` is compared with an H200."""
    return RATES.get(gpu or H200, RATES[H200])


@cache
def rates_here() -> Rates:
    """Return the rates of this machine's current GPU."""
    return rates(device.name(device.current()) if device.count() else None)


class Roofline(NamedTuple):
    """The fewest bytes and operations that a call needs."""

    bytes: int
    flops: int = 0

    def floor(self) -> float:
        """Return the least microseconds at the rates of this machine's GPU."""
        least = rates_here()
        return max(self.bytes / least.bandwidth, self.flops / least.flops) * 1e6
