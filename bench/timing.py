"""Times kernels on a GPU: interleaved replays of CUDA graphs of many calls, with medians and spreads in microseconds.

PyTorch captures the graphs: a call may be anything that launches on torch's current stream (`stream()` is its address).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import Final, NamedTuple

import torch

Call = Callable[[], object]

REPLAYS: Final = 25
"""Timed replays of each variant; they are interleaved in random order, so that drift affects all variants alike."""
SPAN_US: Final = 400.0
"""A timed stretch lasts at least this long: a short graph is replayed several times in it."""
COLD_BYTES: Final = 256 << 20
"""Calls that rotate over this many bytes of inputs find none of them in L2 (50 MB on an H200)."""


REST_S: Final = 0.3


class Timing(NamedTuple):
    """Microseconds per call: the median of the replays, and their lower and upper quartiles.

    With one replay there is no spread: `low` and `high` are None.
    """

    median: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return f"{self.median:.2f}"


def rest() -> None:
    """Wait until the device has ended its work and its clock has risen again.

    After a check in float64, or long work of the tensor cores, an H200 kept its clock at 0.4 to 1.5 GHz for some
    100 ms.
    """
    torch.cuda.synchronize()
    time.sleep(REST_S)


def stream() -> int:
    """Return the address of torch's current stream: inside a capture, the captured one."""
    return int(torch.cuda.current_stream().cuda_stream)


def copies(bytes_: int, least: int = 1, most: int = 64) -> int:
    """Return the number of sets of ``bytes_`` to rotate over, so that a call finds its inputs cold."""
    return max(least, min(most, -(-COLD_BYTES // bytes_)))


def capture(calls: Sequence[Call], least: int = 64) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return a graph of ``calls`` in order, repeated until it has at least ``least`` calls, and their number."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    rounds = -(-least // len(calls))
    graph = torch.cuda.CUDAGraph()
    # In the default mode a graph that the garbage collector frees meanwhile ends the capture.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="relaxed"):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph, rounds * len(calls)


def elapsed(replay: Call, rounds: int) -> float:
    """Return the milliseconds of one replay, averaged over ``rounds`` in a row.

    This cannot be `fp8core.timing.Stopwatch`: `bench.served` times older checkouts, whose fp8core does not have it.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(rounds):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / rounds


def compare(variants: Mapping[str, Sequence[Call]], replays: int = REPLAYS, least: int = 64) -> dict[str, Timing]:
    """Return the time of one call of each variant; the arguments are those of `turns`."""
    return {name: spread(times) for name, times in turns(variants, replays, least).items()}


def fields(times: Mapping[str, Timing]) -> dict[str, dict[str, float | None]]:
    """Return times as fields of a record."""
    return {name: time._asdict() for name, time in times.items()}


def turns(variants: Mapping[str, Sequence[Call]], replays: int = REPLAYS, least: int = 64) -> dict[str, list[float]]:
    """Return the microseconds of one call of each variant in each turn.

    Args:
        variants: by name, the calls of a variant, one for each set of buffers that it rotates over. They are warmed
            up, captured into one graph of at least ``least`` calls, and replayed.
        replays: the number of timed replays of each variant.
        least: the least number of calls in a graph, so that the gaps between graphs do not matter.
    """
    from fp8core.timing import (
        interleaved,  # imported here, as `bench.served` uses this module with fp8core 0.1, which lacks it
    )

    graphs = {name: capture(calls, least) for name, calls in variants.items()}
    runs = {name: graph.replay for name, (graph, _) in graphs.items()}
    found = interleaved(runs, elapsed, replays, SPAN_US / 1e3)
    return {name: [1e3 * ms / graphs[name][1] for ms in times] for name, times in found.items()}


def spread(times: list[float]) -> Timing:
    """Return the median of times, and their quartiles."""
    low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (None, None, None)
    return Timing(median(times), low, high)
