"""10,000 launches of the kernels whose blocks or launches meet, under load: each result has the bits of a quiet GPU.

A graph holds turns of: poison the results, launch the call several times in a row, count on the device what differs.
It is replayed beside a twin, a graph of the same call with operands of its own, and beside streams that keep the memory
and the tensor cores busy. Nothing waits, and no time is asserted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, Float8Array
from fp8core.runtime import device
from ops.test_product import LINEARS
from support import reference

pytestmark = pytest.mark.gpu

IN_A_ROW = 4
"""Calls between two comparisons: a product may begin while the one before it ends."""
TURNS = 25
REPLAYS = 100
REPEATS = IN_A_ROW * TURNS * REPLAYS
LOAD = 20
"""Steps of each load beside a replay."""
SLOT_ALIGNMENT = 512

COUNT = r"""
struct Counted { unsigned long long words, calls, beside, load; };

// Results in slots against the one that is wanted; `beside` grows where the load has moved on since the last comparison.
extern "C" __global__ void count(const unsigned* got, const unsigned* want, long long words, int calls,
                                 const volatile unsigned long long* load, Counted* counted) {
    const long long first = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    unsigned long long different = 0;
    for (long long i = first; i < words; i += static_cast<long long>(gridDim.x) * blockDim.x)
        for (int call = 0; call < calls; ++call) different += got[call * words + i] != want[i];
    if (different) atomicAdd(&counted->words, different);
    if (first) return;
    const unsigned long long now = load[0] + load[1];
    counted->calls += calls;
    counted->beside += now != counted->load;
    counted->load = now;
}
"""


class Call(NamedTuple):
    """What is repeated: ``run`` launches it into memory of ``nbytes``, ``error`` says how far the result there is off."""

    nbytes: int
    run: Callable[[Any], None]
    error: Callable[[Any], float]
    most: float


def codes(cp, generator, *shape):
    """Return random FP8 numbers below 2: the exponent's highest bit is never set."""
    return Float8Array(generator.integers(0, 256, shape, dtype=cp.uint8) & cp.uint8(0xBF), "float8_e4m3fn")


def product(cp, seed, mode, m, n, k, **options):
    rng = cp.random.default_rng(seed)
    a, weight = codes(cp, rng, m, k), codes(cp, rng, n, k)
    blocks = -(-k // 128)
    shapes = {"tensor": ((1, 1), (1, 1)), "row": ((m, 1), (n, 1)), "block": ((m, blocks), (-(-n // 128), blocks))}
    scale_a, scale_b = (rng.random(shape, dtype=cp.float32) - 0.5 for shape in shapes[mode])
    groups = {"block": (GROUP_128, BLOCK_128)}.get(mode, (None, None))

    def result(memory):
        return memory.view(cp.float16)[: m * n].reshape(m, n)

    def run(memory):
        fp8core.scaled_mm_nt(a, weight, scale_a, scale_b, out_dtype="float16", out=result(memory), **options)

    def error(memory):
        wide_a, wide_b = (
            fp8core.dequantize(x, scale, group_shape=group).astype(cp.float64)
            for x, scale, group in zip((a, weight), (scale_a, scale_b), groups, strict=True)
        )
        return reference.relative_error(result(memory).get(), (wide_a @ wide_b.T).get())

    return Call(2 * m * n, run, error, 3e-3)


def linear(cp, seed, scheme, m, n, k):
    """Return two calls of a layer: each quantization leaves its codes where those of the call before were."""
    rng = cp.random.default_rng(seed)
    shapes = (m, k), (m, k), (n, k)
    x, before, weight = (rng.standard_normal(shape, dtype=cp.float32).astype(cp.float16) for shape in shapes)
    spare = cp.empty((m, n), cp.float16)
    options, most = LINEARS[scheme]
    layer = fp8core.Fp8Linear.from_weight(weight, **options)
    layer(x)  # from the second call on the product reads its weight early

    def result(memory):
        return memory.view(cp.float16)[: m * n].reshape(m, n)

    def error(memory):
        want = x.astype(cp.float64) @ weight.T.astype(cp.float64)
        return reference.relative_error(result(memory).get(), want.get())

    def run(memory):
        layer(before, out=spare)
        layer(x, out=result(memory))

    return Call(2 * m * n, run, error, most)


def quantization(cp, seed, rows, cols):
    x = cp.random.default_rng(seed).standard_normal((rows, cols), dtype=cp.float32).astype(cp.float16)

    def result(memory):
        at = -(-rows * cols // 16) * 16
        data = Float8Array(memory[: rows * cols].reshape(rows, cols), "float8_e4m3fn")
        return data, memory[at : at + 4].view(cp.float32)

    def error(memory):
        want = fp8core.quantize(x.get(), group_shape=PER_TENSOR)
        data, scale = result(memory)
        same = np.array_equal(data.codes.get(), want.data.view(np.uint8)) and scale.get() == want.scale
        return 0.0 if same else 1.0

    def run(memory):
        fp8core.quantize(x, group_shape=PER_TENSOR, out=result(memory))

    return Call(rows * cols + 32, run, error, 0.0)


CALLS = {
    # on an H200: products with a block a tile, and of clusters of 2, 4 and 8 blocks that split k
    "tensor-1x28672x1024": (product, "tensor", 1, 28672, 1024),
    "tensor-64x2112x7168": (product, "tensor", 64, 2112, 7168),
    "row-1x4096x4096": (product, "row", 1, 4096, 4096),
    "row-16x2112x7168": (product, "row", 16, 2112, 7168),
    "row-16x28672x1024": (product, "row", 16, 28672, 1024),
    "row-17x512x16384": (product, "row", 17, 512, 16384),
    "row-64x4096x4096": (product, "row", 64, 4096, 4096),
    "block-3x4096x4096": (product, "block", 3, 4096, 4096),
    "block-32x1024x4096": (product, "block", 32, 1024, 4096),
    "block-64x2112x7168": (product, "block", 64, 2112, 7168),
    # on an H200: products whose blocks take several tiles and exchange partial sums for each
    "row-1x8704x4096": (product, "row", 1, 8704, 4096),
    "row-16x15104x1024": (product, "row", 16, 15104, 1024),
    "row-64x8704x2048": (product, "row", 64, 8704, 2048),
    "block-16x8704x4096": (product, "block", 16, 8704, 4096),
    # on an H200: tiles that two or four blocks share
    "row-128x576x7168": (product, "row", 128, 576, 7168),
    "block-100x512x4096": (product, "block", 100, 512, 4096),
    "linear-channel-1x4096x4096": (linear, "channel", 1, 4096, 4096),
    "linear-channel-64x2112x7168": (linear, "channel", 64, 2112, 7168),
    "linear-tensor-16x2112x7168": (linear, "tensor", 16, 2112, 7168),
    "linear-block-64x1024x4096": (linear, "block", 64, 1024, 4096),
    "quantize-1x4096": (quantization, 1, 4096),
    "quantize-132x1001": (quantization, 132, 1001),
    "quantize-1024x8192": (quantization, 1024, 8192),
}


class Repeats:
    """A call with operands of its own, as a graph on a stream of its own."""

    def __init__(self, cp, call, load):
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.call = call  # a graph has addresses, and keeps nothing alive
        words = -(-call.nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT // 4
        self.want = cp.full(words, 0xFFFFFFFF, cp.uint32)
        self.slots = cp.empty((IN_A_ROW, words), cp.uint32)
        self.counted = cp.zeros(4, cp.uint64)
        call.run(self.want.view(cp.uint8))
        assert call.error(self.want.view(cp.uint8)) <= call.most
        kernel = cp.RawKernel(COUNT, "count")
        memory = [slot.view(cp.uint8) for slot in self.slots]

        def turn():
            self.slots.data.memset_async(0xFF, self.slots.nbytes, self.stream)
            for slot in memory:
                call.run(slot)
            kernel((264,), (256,), (self.slots, self.want, words, np.int32(IN_A_ROW), load, self.counted))

        cp.cuda.get_current_stream().synchronize()
        with self.stream:
            turn()
            self.stream.synchronize()
            self.stream.begin_capture()
            for _ in range(TURNS):
                turn()
            self.graph = self.stream.end_capture()
        self.counted.fill(0)


@pytest.fixture(scope="module")
def cupy():
    return device.cupy()


@pytest.fixture(scope="module")
def loads(cupy):
    """Return what keeps the memory busy and what keeps the tensor cores busy, each with a stream of its own."""
    cp = cupy
    noise, square = cp.zeros(16 << 20, cp.float32), cp.zeros((2048, 2048), cp.float16)
    result = cp.empty_like(square)
    steps = (lambda: cp.add(noise, np.float32(1), out=noise), lambda: cp.matmul(square, square, out=result))
    return [(step, cp.cuda.Stream(non_blocking=True)) for step in steps]


@pytest.mark.parametrize("name", CALLS)
def test_ten_thousand_repeats_under_load_have_the_same_bits(cupy, loads, name):
    make, *arguments = CALLS[name]
    ticks = cupy.zeros(len(loads), cupy.uint64)
    both = [Repeats(cupy, make(cupy, seed, *arguments), ticks) for seed in (1, 2)]
    cupy.cuda.Device().synchronize()
    for _ in range(REPLAYS):
        begins = both[0].stream.record()
        for repeats in both:
            repeats.graph.launch(repeats.stream)
        for number, (step, stream) in enumerate(loads):
            stream.wait_event(begins)
            with stream:
                for _ in range(LOAD):
                    step()
                    ticks[number : number + 1] += 1
    cupy.cuda.Device().synchronize()
    for repeats in both:
        words, calls, beside, _ = repeats.counted.tolist()
        assert (words, calls) == (0, REPEATS)
        assert beside > REPLAYS, f"the load moved on at {beside} of {REPEATS // IN_A_ROW} comparisons: no load"
