"""The time of launches on a GPU: synthetic operands, weights that come from memory, graphs in random turns."""

import ctypes
import logging
import random
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple, TypeVar

from fp8core.errors import BackendError
from fp8core.kernels.gemm.args import Matmul
from fp8core.problem import BLOCK, ITEMSIZE, ScaledMm, Target
from fp8core.runtime import capture, device, hip_graphs

COLD_BYTES: Final = 192 << 20
"""Weights rotate over this much, so that none of them stays in L2 (50 MB on an H200)."""
INFINITY_CACHE_COLD_BYTES: Final = 768 << 20
"""The same on MI300 and MI350 (gfx94x, gfx95x), whose Infinity Cache has 256 MB."""
MOST_WEIGHTS: Final = 64
"""So many at most where `COLD_BYTES` are enough, and more in the same proportion."""
CALLS: Final = 8
"""A graph holds at least as many calls."""
TURNS: Final = 9
WARM_UP: Final = 2
STRETCH_MS: Final = 1.0
"""A timed stretch lasts at least this long."""
HOPELESS: Final = 4.0
LAUNCH_MS: Final = 0.03

_LOG: Final = logging.getLogger("fp8core")
_PATTERN_BYTES: Final = 1 << 20
_FINITE: Final = bytes(0 if code & 0xBF == 0x80 else code & 0xBF for code in range(256))
"""Makes of any byte a code of magnitude below 2, in each of the FP8 formats."""

Run = Callable[[], object]
K = TypeVar("K", bound=Hashable)


def interleaved(
    runs: Mapping[K, Run], elapsed: Callable[[Run, int], float], turns: int = TURNS, stretch_ms: float = STRETCH_MS
) -> dict[K, list[float]]:
    """Return the milliseconds of each run in each turn; every turn takes the runs in another order.

    What drifts, drifts for all, and what one run does to the clock does not always hit the same other.

    Args:
        runs: what is timed, by name.
        elapsed: the milliseconds of a run, made so many times in a row.
        turns: timed ones; `WARM_UP` others go before, which tell how many runs last ``stretch_ms``.
        stretch_ms: how long a timed stretch lasts at least.
    """
    repeats = dict.fromkeys(runs, 1)
    found: dict[K, list[float]] = {name: [] for name in runs}
    order, chance = list(runs), random.Random(0)
    for turn in range(-WARM_UP, turns):
        chance.shuffle(order)
        for name in order:
            ms = elapsed(runs[name], repeats[name])
            if turn < 0:
                repeats[name] = 1 + int(stretch_ms / max(ms, 1e-6))
            else:
                found[name].append(ms)
    return found


def cold_bytes(target: Target) -> int:
    """Return how many bytes of weights to rotate over on a device, so that each one comes from memory."""
    infinity_cache = target.platform == "hip" and target.arch >> 4 in (0x94, 0x95)
    return INFINITY_CACHE_COLD_BYTES if infinity_cache else COLD_BYTES


def copies_of(target: Target, weight_bytes: int) -> int:
    """Return how many weights of a size to rotate over on a device; of small ones fewer than would be cold."""
    cold = cold_bytes(target)
    return max(2, min(MOST_WEIGHTS * cold // COLD_BYTES, -(-cold // weight_bytes)))


class Operands:
    """Device memory for a problem: random codes, scales of one, and as many weights as keep them cold."""

    def __init__(self, p: ScaledMm, scratch_bytes: int) -> None:
        codes = random.Random(0).randbytes(_PATTERN_BYTES).translate(_FINITE)
        ones = struct.pack("<f", 1.0) * (_PATTERN_BYTES // 4)
        blocks = -(-p.k // BLOCK)
        near_vectors = p.vectors_alignment % 16
        near_codes, near_out = (max(p.alignment, own) % 16 for own in (p.codes_alignment, p.out_alignment))
        near_out = near_out and max(near_out, ITEMSIZE[p.out])
        near_floats = near_vectors and max(near_vectors, 4)
        self._memory: list[Any] = []

        def scales(rows: int, strides: tuple[int, int]) -> int:
            numbers = (rows - 1) * strides[0] + (blocks - 1) * strides[1] + 1
            return self._area(4 * numbers, ones, near_floats)

        weight_bytes = -(-p.n * p.ldb // 256) * 256
        copies = copies_of(p.target, weight_bytes)
        first = self._area(weight_bytes * copies, codes, near_codes)
        self.weights = range(first, first + weight_bytes * copies, weight_bytes)
        self._a = self._area(p.m * p.lda, codes, near_codes)
        self._vectors = (
            scales(p.m, p.scale_a_strides),
            scales(p.n, p.scale_b_strides),
            self._area(p.n * ITEMSIZE[p.bias], bytes(_PATTERN_BYTES), near_vectors) if p.bias else 0,
        )
        self._results = (
            self._area(p.m * p.ldo * ITEMSIZE[p.out], b"", near_out),
            self._area(4, ones, 0) if p.out_scale else 0,
            self._area(4, ones, near_floats) if p.amax else 0,
            self._area(scratch_bytes, b"", 0),
        )

    def _area(self, nbytes: int, pattern: bytes, offset: int) -> int:
        """Return the address of new memory that repeats a pattern, if there is one: ``offset`` off a multiple of 256.

        It comes from the driver and goes back to it, not to a pool.
        """
        memory = device.cupy().cuda.Memory(nbytes + 256)
        self._memory.append(memory)
        start = int(memory.ptr) + offset
        runtime = device.cupy().cuda.runtime
        done = min(nbytes, len(pattern))
        if done:
            host = ctypes.cast(ctypes.c_char_p(pattern), ctypes.c_void_p).value
            runtime.memcpy(start, host, done, runtime.memcpyHostToDevice)
        while 0 < done < nbytes:
            more = min(done, nbytes - done)
            runtime.memcpy(start + done, start, more, runtime.memcpyDeviceToDevice)
            done += more
        return start

    def run(self, launch: Matmul, stream: int, weight: int) -> None:
        """Launch a product of the weight at an address."""
        launch(stream, self._a, weight, *self._vectors, *self._results)


class Stopwatch:
    """A stream of its own on CuPy's current device, and a pair of events that time what runs on it."""

    def __init__(self) -> None:
        cuda = device.cupy().cuda
        self.stream = cuda.Stream(non_blocking=True)
        self._begin, self._end = cuda.Event(), cuda.Event()

    def elapsed(self, run: Run, rounds: int = 1) -> float:
        """Return the milliseconds of a run, made so many times in a row."""
        self._begin.record(self.stream)
        for _ in range(rounds):
            run()
        self._end.record(self.stream)
        self._end.synchronize()
        return float(device.cupy().cuda.get_elapsed_time(self._begin, self._end)) / rounds


class Sampling(NamedTuple):
    """How closely launches are timed."""

    turns: int = TURNS
    stretch_ms: float = STRETCH_MS
    span_us: float = 0.0
    """The calls of a graph last about so long, where `CALLS` of them are shorter."""
    hopeless: float = HOPELESS
    """A launch that takes this many times the least, and longer than its way through the host, is not timed closer."""


def times(p: ScaledMm, launches: Sequence[Matmul]) -> list[float]:
    """Return the microseconds that each launch of ``p`` takes, infinite for one that fails or is far behind."""
    return [median(taken) if taken else float("inf") for taken in samples(p, launches)]


def samples(p: ScaledMm, launches: Sequence[Matmul], how: Sampling | None = None) -> list[list[float]]:
    """Return the microseconds that each launch of ``p`` takes in each turn; no turn of one that fails or is far behind.

    Weights come from memory, what else is read most likely from L2.
    """
    how = how or Sampling()
    with device.on(p.target.device):
        operands = Operands(p, max(launch.scratch_bytes for launch in launches))
        device.cupy().cuda.runtime.deviceSynchronize()  # what fills them is on another stream
        watch = Stopwatch()
        first: dict[int, float] = {}
        for i, launch in enumerate(launches):
            once = partial(operands.run, launch, watch.stream.ptr, operands.weights[0])
            try:
                once()
            except BackendError:  # what a library offers it may still refuse to run
                continue
            first[i] = min(watch.elapsed(once) for _ in range(2))
        least = min(first.values(), default=0.0)
        close = how.hopeless * max(LAUNCH_MS, least)
        calls = calls_of(operands, how.span_us / max(1e3 * least, 1.0))
        runs = {i: recorded(operands, launches[i], watch.stream, calls) for i, ms in first.items() if ms <= close}
        found = interleaved(runs, watch.elapsed, how.turns, how.stretch_ms)
        return [[1e3 * ms / calls for ms in found.get(i, ())] for i in range(len(launches))]


def calls_of(operands: Operands, wanted: float = 0.0) -> int:
    """Return how many calls a graph holds, at least `CALLS`: each weight as often as the others."""
    copies = len(operands.weights)
    return max(-(-CALLS // copies), round(wanted / copies)) * copies


def recorded(operands: Operands, launch: Matmul, stream: Any, number: int) -> Run:
    """Return a run of a graph of so many calls, each with the next weight."""

    def calls() -> None:
        for i in range(number):
            operands.run(launch, stream.ptr, operands.weights[i % len(operands.weights)])

    return graph_of(stream, calls)


def graph_of(stream: Any, calls: Run) -> Run:
    """Return a run of a graph of what ``calls`` launches on a CuPy stream.

    On ROCm, for which CuPy has no graphs, it is one of the driver's. Where that does not record them, as a library may
    not, it is the calls themselves: then times of short ones hold the host's share.
    """
    if device.platform() == "hip":
        try:
            return partial(hip_graphs.HipGraph(stream.ptr, calls).launch, stream.ptr)
        except BackendError as error:
            _LOG.warning("without a graph, so that times hold the host's share: %s", error)
            return calls
    return partial(captured(stream, calls).launch, stream)


def captured(stream: Any, calls: Run) -> Any:
    """Return the graph of what ``calls`` launches on a CuPy stream, which is no longer captured whatever happens."""
    stream.begin_capture()
    return capture.record(calls, stream.end_capture, device.cupy().cuda.runtime.CUDARuntimeError)
