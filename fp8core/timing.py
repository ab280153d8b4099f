"""Times launches on a GPU: with synthetic operands, cold weights, and graphs that run in random order."""

import ctypes
import logging
import random
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple, TypeVar

from fp8core.dtypes import ITEMSIZE
from fp8core.errors import BackendError
from fp8core.interop.tensor import bytes_reached
from fp8core.kernels.encodings import round_up
from fp8core.kernels.gemm.args import Matmul
from fp8core.problem import BLOCK, ScaledMm
from fp8core.runtime import capture, device, hip_graphs
from fp8core.target import Target

COLD_BYTES: Final = 192 << 20
"""The total size of the weights that calls take in turn, so that none stays in L2 (50 MB on an H200)."""
INFINITY_CACHE_COLD_BYTES: Final = 768 << 20
"""The same for MI300 and MI350 (gfx94x, gfx95x), whose Infinity Cache has 256 MB."""
MOST_WEIGHTS: Final = 64
"""The most weights for `COLD_BYTES`; for more bytes, more weights in proportion."""
CALLS: Final = 8
"""The least number of calls in a graph."""
TURNS: Final = 9
WARM_UP: Final = 2
STRETCH_MS: Final = 1.0
"""The least duration of a timed stretch, in milliseconds."""
HOPELESS: Final = 4.0
LAUNCH_MS: Final = 0.03

_LOG: Final = logging.getLogger("fp8core")
_PATTERN_BYTES: Final = 1 << 20
_FINITE: Final = bytes(0 if code & 0xBF == 0x80 else code & 0xBF for code in range(256))
"""Maps any byte to a code with a magnitude below 2 in every FP8 format."""

Run = Callable[[], object]
K = TypeVar("K", bound=Hashable)


def interleaved(
    runs: Mapping[K, Run], elapsed: Callable[[Run, int], float], turns: int = TURNS, stretch_ms: float = STRETCH_MS
) -> dict[K, list[float]]:
    """Return the milliseconds of each run in each turn; every turn makes the runs in another random order.

    So drift affects all runs alike, and the effect of one run on the GPU's clock does not always hit the same other
    run.

    Args:
        runs: the runs to time, by name.
        elapsed: returns the milliseconds per run of a number of runs in a row.
        turns: the number of timed turns; `WARM_UP` turns before them find how many runs take ``stretch_ms``.
        stretch_ms: the least duration of a timed stretch.
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
    """Return the total bytes of weights to take in turn on a device, so that each is read from memory."""
    infinity_cache = target.platform == "hip" and target.arch >> 4 in (0x94, 0x95)
    return INFINITY_CACHE_COLD_BYTES if infinity_cache else COLD_BYTES


def copies_of(target: Target, weight_bytes: int) -> int:
    """Return the number of weights of a size to take in turn on a device; it is limited, so small ones stay in L2."""
    cold = cold_bytes(target)
    return max(2, min(MOST_WEIGHTS * cold // COLD_BYTES, -(-cold // weight_bytes)))


def _offset(alignment: int, itemsize: int = 1) -> int:
    """Return the bytes from a multiple of 16 to elements that are aligned so, and no better; 0 from 16 on."""
    return 0 if alignment % 16 == 0 else max(alignment, itemsize)


class Operands:
    """Device memory for a problem: random codes, scales of 1, and enough weights to keep them cold."""

    def __init__(self, p: ScaledMm, scratch_bytes: int) -> None:
        codes = random.Random(0).randbytes(_PATTERN_BYTES).translate(_FINITE)
        ones = struct.pack("<f", 1.0) * (_PATTERN_BYTES // 4)
        blocks = -(-p.k // BLOCK)
        near_codes = _offset(max(p.alignment, p.codes_alignment))
        near_out = _offset(max(p.alignment, p.out_alignment), ITEMSIZE[p.out])
        near_vectors, near_floats = _offset(p.vectors_alignment), _offset(p.vectors_alignment, 4)
        near_scale_a = _offset(max(p.vectors_alignment, p.scale_a_alignment), 4)
        self._memory: list[Any] = []

        def scales(rows: int, strides: tuple[int, int], near: int) -> int:
            begin, end = bytes_reached((rows, blocks), strides, "float32")
            before = round_up(-begin, 256)  # scales in reverse order lie before the first
            return self._area(before + end, ones, near) + before

        weight_bytes = -(-p.n * p.ldb // 256) * 256
        copies = copies_of(p.target, weight_bytes)
        first = self._area(weight_bytes * copies, codes, near_codes)
        self.weights = range(first, first + weight_bytes * copies, weight_bytes)
        self._a = self._area((p.m - 1) * p.lda + max(p.k, p.lda), codes, near_codes)  # rows may overlap
        self._vectors = (
            scales(p.m, p.scale_a_strides, near_scale_a),
            scales(p.n, p.scale_b_strides, near_floats),
            self._area(p.n * ITEMSIZE[p.bias], bytes(_PATTERN_BYTES), near_vectors) if p.bias else 0,
        )
        self._results = (
            self._area(p.m * p.ldo * ITEMSIZE[p.out], b"", near_out),
            self._area(4, ones, 0) if p.out_scale else 0,
            self._area(4, ones, near_floats) if p.amax else 0,
            self._area(scratch_bytes, b"", 0),
        )

    def _area(self, nbytes: int, pattern: bytes, offset: int) -> int:
        """Return the address of new memory, ``offset`` bytes after a multiple of 256, filled with a repeated pattern.

        With an empty pattern it is uninitialized. It is allocated by the driver, not from a pool.
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
        """Launch a product with the weight at an address."""
        launch(stream, self._a, weight, *self._vectors, *self._results)


class Stopwatch:
    """A new stream on CuPy's current device, and a pair of events that time work on it."""

    def __init__(self) -> None:
        cuda = device.cupy().cuda
        self.stream = cuda.Stream(non_blocking=True)
        self._begin, self._end = cuda.Event(), cuda.Event()

    def elapsed(self, run: Run, rounds: int = 1) -> float:
        """Return the milliseconds per run of ``rounds`` runs in a row."""
        self._begin.record(self.stream)
        for _ in range(rounds):
            run()
        self._end.record(self.stream)
        self._end.synchronize()
        return float(device.cupy().cuda.get_elapsed_time(self._begin, self._end)) / rounds


class Sampling(NamedTuple):
    """The effort spent on timing launches."""

    turns: int = TURNS
    stretch_ms: float = STRETCH_MS
    span_us: float = 0.0
    """The duration to fill with calls of a graph, if `CALLS` of them take less."""
    hopeless: float = HOPELESS
    """Launches slower than this factor times the larger of the fastest launch and `LAUNCH_MS` are not timed in
    turns."""


def times(p: ScaledMm, launches: Sequence[Matmul]) -> list[float]:
    """Return the median microseconds of each launch of ``p``; infinite for one that fails or is far slower."""
    return [median(taken) if taken else float("inf") for taken in samples(p, launches)]


def samples(p: ScaledMm, launches: Sequence[Matmul], how: Sampling | None = None) -> list[list[float]]:
    """Return the microseconds of each launch of ``p`` in each turn; an empty list for one that fails or is far slower.

    Weights are read from memory, and everything else most likely from L2.
    """
    how = how or Sampling()
    with device.on(p.target.device):
        operands = Operands(p, max(launch.scratch_bytes for launch in launches))
        device.cupy().cuda.runtime.deviceSynchronize()  # they are filled on another stream
        watch = Stopwatch()
        first: dict[int, float] = {}
        for i, launch in enumerate(launches):
            once = partial(operands.run, launch, watch.stream.ptr, operands.weights[0])
            try:
                once()
            except BackendError:  # a library may refuse to run an algorithm that it offers
                continue
            first[i] = min(watch.elapsed(once) for _ in range(2))
        least = min(first.values(), default=0.0)
        close = how.hopeless * max(LAUNCH_MS, least)
        calls = calls_of(operands, how.span_us / max(1e3 * least, 1.0))
        runs = {i: recorded(operands, launches[i], watch.stream, calls) for i, ms in first.items() if ms <= close}
        found = interleaved(runs, watch.elapsed, how.turns, how.stretch_ms)
        return [[1e3 * ms / calls for ms in found.get(i, ())] for i in range(len(launches))]


def calls_of(operands: Operands, wanted: float = 0.0) -> int:
    """Return the number of calls in a graph, at least `CALLS`; a multiple of the number of weights."""
    copies = len(operands.weights)
    return max(-(-CALLS // copies), round(wanted / copies)) * copies


def recorded(operands: Operands, launch: Matmul, stream: Any, number: int) -> Run:
    """Return a run of a graph of ``number`` calls, each with the next weight."""

    def calls() -> None:
        for i in range(number):
            operands.run(launch, stream.ptr, operands.weights[i % len(operands.weights)])

    return graph_of(stream, calls)


def graph_of(stream: Any, calls: Run) -> Run:
    """Return a run of a graph of the launches that ``calls`` makes on a CuPy stream.

    CuPy has no graphs on ROCm, so there the driver's are used. If the driver cannot record the calls (some library
    calls cannot be captured), the run is ``calls`` itself, and times of short calls include host time.
    """
    if device.platform() == "hip":
        try:
            return partial(hip_graphs.HipGraph(stream.ptr, calls).launch, stream.ptr)
        except BackendError as error:
            _LOG.warning("timing without a graph, so times include host time: %s", error)
            return calls
    return partial(captured(stream, calls).launch, stream)


def captured(stream: Any, calls: Run) -> Any:
    """Return the graph of the launches that ``calls`` makes on a CuPy stream; the capture ends even if they fail."""
    stream.begin_capture()
    return capture.record(calls, stream.end_capture, device.cupy().cuda.runtime.CUDARuntimeError)
