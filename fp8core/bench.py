"""The short benchmark of the command line: a few public functions, on the device at hand."""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from fp8core.ops import dequantize, quantize, scaled_mm_nt
from fp8core.ops.explain import explain, target_of
from fp8core.problem import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, native_e4m3
from fp8core.runtime import device

IN_A_ROW: Final = 20
"""GPU calls between two synchronisations, so that waiting for the device is not what is timed."""


class Timing(NamedTuple):
    """Seconds a call."""

    best: float
    median: float


class Case(NamedTuple):
    """One call, the kernel that it gets, and what it moves or computes: bytes for copies, operations for products."""

    name: str
    kernel: str
    call: Callable[[], object]
    work: float
    unit: str

    def rate(self, timing: Timing) -> str:
        """Return the work done in a second of the best run."""
        return f"{self.work / timing.best / 1e9:,.1f} G{self.unit}/s"


def place() -> str:
    """Return the name of the device that is timed."""
    return str(target_of(None))


def cases(tokens: int, width: int) -> Iterator[Case]:
    """Give the cases for activations [tokens, width] and a weight [width, width], in the E4M3 of the device."""
    dtype = native_e4m3(target_of(None))
    random = np.random.default_rng(0)
    x: Any = random.standard_normal((tokens, width), np.float32).astype(ml_dtypes.bfloat16)
    weight: Any = random.standard_normal((width, width), np.float32)
    if device.count():
        # CuPy has no bfloat16 of its own: half floats are as wide.
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
    """Return how long a call takes, measured for about ``seconds`` after one call that makes everything ready."""
    repeats = IN_A_ROW if device.count() else 1
    synchronize = device.cupy().cuda.get_current_stream().synchronize if device.count() else lambda: None
    case.call()
    synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(repeats):
            case.call()
        synchronize()
        times.append((time.perf_counter() - start) / repeats)
    return Timing(min(times), median(times))
