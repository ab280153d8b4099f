"""The short benchmark of the command line: times a few public functions on the current device.

On a GPU it reports two times: that of repeated calls from Python, and that of their kernels alone, in a graph.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from fp8core import timing
from fp8core.ops import dequantize, quantize, scaled_mm_nt
from fp8core.ops.explain import explain
from fp8core.ops.targets import target_of
from fp8core.problem import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN
from fp8core.runtime import device
from fp8core.target import native_e4m3

IN_A_ROW: Final = 20
"""The number of GPU calls between two synchronisations, or in a graph, so that the time of waiting is small."""


class Timing(NamedTuple):
    """Median seconds of a call."""

    call: float
    gpu: float | None
    """The time of its kernels in a graph, with operands in L2 if they fit; None on the host."""


class Case(NamedTuple):
    """One call, its kernel, and its work: bytes moved, or operations for products."""

    name: str
    kernel: str
    call: Callable[[], object]
    work: float
    unit: str

    def rate(self, timing: Timing) -> str:
        """Return the work per second as text; on a GPU by the time of the kernels."""
        rate = self.work / (timing.gpu or timing.call)
        return f"{rate / 1e12:,.3g} T{self.unit}/s" if rate >= 1e12 else f"{rate / 1e9:,.3g} G{self.unit}/s"


def place() -> str:
    """Return the name of the benchmarked device."""
    return str(target_of(None))


def cases(tokens: int, width: int) -> Iterator[Case]:
    """Yield the cases for activations [tokens, width] and a weight [width, width], in the E4M3 of the device."""
    dtype = native_e4m3(target_of(None))
    random = np.random.default_rng(0)
    x: Any = random.standard_normal((tokens, width), np.float32).astype(ml_dtypes.bfloat16)
    weight: Any = random.standard_normal((width, width), np.float32)
    if device.count():
        # CuPy has no bfloat16; float16 has the same size.
        x, weight = device.cupy().asarray(x.astype(np.float16)), device.cupy().asarray(weight)
    for name, group in (("per tensor", PER_TENSOR), ("per token", PER_TOKEN), ("1x128", GROUP_128)):
        yield _case(f"quantize {name}", 3.0 * tokens * width, "B", quantize, x, dtype=dtype, group_shape=group)
    data, scale = quantize(x, dtype=dtype)
    yield _case("dequantize per token", 3.0 * tokens * width, "B", dequantize, data, scale, dtype="float16")
    operations = 2.0 * tokens * width * width
    for name, group, weight_group in (
        ("per tensor", PER_TENSOR, PER_TENSOR),
        ("per token", PER_TOKEN, PER_TOKEN),
        ("1x128 by 128x128", GROUP_128, BLOCK_128),
    ):
        a = quantize(x, dtype=dtype, group_shape=group)
        b = quantize(weight, dtype=dtype, group_shape=weight_group)
        operands = (a.data, b.data, a.scale, b.scale)
        yield _case(f"product {name}", operations, "FLOP", scaled_mm_nt, *operands, out_dtype="float16")


def _case(name: str, work: float, unit: str, function: Callable[..., object], *args: Any, **kwargs: Any) -> Case:
    kernel = str(explain(function, *args, **kwargs).chosen)
    return Case(name, kernel, lambda: function(*args, **kwargs), work, unit)


def timed(case: Case, seconds: float) -> Timing:
    """Measure a call for about ``seconds``, after one call that compiles and plans."""
    if not device.count():
        case.call()
        return Timing(_called(case.call, seconds, 1, lambda: None), None)
    device.cupy().cuda.runtime.deviceSynchronize()  # the operands are filled on another stream
    watch = timing.Stopwatch()
    with watch.stream:
        case.call()
        call = _called(case.call, seconds / 2, IN_A_ROW, watch.stream.synchronize)
        run = timing.graph_of(watch.stream, lambda: _repeat(case.call, IN_A_ROW))
        found = timing.interleaved({"graph": run}, watch.elapsed, stretch_ms=1e3 * seconds / 2 / timing.TURNS)
    return Timing(call, median(found["graph"]) / 1e3 / IN_A_ROW)


def _called(call: Callable[[], object], seconds: float, repeats: int, synchronize: Callable[[], object]) -> float:
    """Return the median seconds of a call by the host's clock."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        _repeat(call, repeats)
        synchronize()
        times.append((time.perf_counter() - start) / repeats)
    return median(times)


def _repeat(call: Callable[[], object], repeats: int) -> None:
    for _ in range(repeats):
        call()
