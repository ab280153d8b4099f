"""Products on sm_90a: problems, recorded launches, and on a device random operands with results in float64."""

import itertools
import math

import numpy as np
import pytest

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.gemm.blaslt.moves import NOTHING, plan_moves
from fp8core.kernels.gemm.sm90 import decode as sm90_decode
from fp8core.kernels.gemm.sm90 import tensor_maps
from fp8core.problem import ScaledMm
from fp8core.runtime import device, jit
from support.recorder import Recorder
from support.targets import H200

FORMATS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
MODES = [*itertools.product(("tensor", "row"), repeat=2), ("group", "block"), ("group", "group")]
OUTS = [(1000, 1000, 1), (1000, 1002, 0), (1000, 1004, 0), (1000, 1004, 2), (1000, 1008, 4), (999, 1001, 1)]
"""n, row stride and offset of the first row, in elements: rows that are aligned to 2, 4 or 8 bytes."""
HALF_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""The rounding error of the result, relative to it."""
SMALLEST = {"bfloat16": 2.0**-126, "float16": 2.0**-25, "float32": 2.0**-126}
"""An absolute error that is always allowed: kernels flush subnormal fp32 numbers to zero."""
OF_TERMS = 2.0**-10
"""The error of accumulation, relative to the sum of the terms' magnitudes: the tensor cores truncate about 14 bits
below the largest of 32 products."""
SMALL = {"float16": 1e-3, "bfloat16": 1.0, "float32": 1.0}
"""By dtype of the result: a factor on the scales, so that float16 results stay below 65504."""


def problem(m, n, k, **fields):
    basis = {
        "target": H200,
        "a": "float8_e4m3fn",
        "b": "float8_e4m3fn",
        "out": "bfloat16",
        "scale_a": "row",
        "scale_b": "row",
        "scale_a_strides": (1, 0),
        "scale_b_strides": (1, 0),
        "bias": "",
        "out_scale": False,
        "amax": False,
        "use_fast_accum": True,
        "batch_invariant": False,
        "lda": -(-k // 16) * 16,
        "ldb": -(-k // 16) * 16,
        "ldo": n,
        "alignment": 16,
        "prefetch_weight": True,
    }
    return ScaledMm(m=m, n=n, k=k, **{**basis, **fields})


@pytest.fixture
def asked(monkeypatch):
    """Return a list to which each launch appends its entry, stream and arguments."""
    found = []
    monkeypatch.setattr(jit, "prepare", lambda target, source, entry, *_, **__: Recorder(entry, found))
    monkeypatch.setattr(tensor_maps, "encode", lambda *geometry: repr(geometry).encode())
    return found


def decode(codes, name):
    """Return codes on device 0 as float64."""
    import ml_dtypes

    cp = device.cupy()
    return cp.asarray(np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float64))[codes]


def wide(storage, name):
    """Return 16-bit or fp32 storage as float64."""
    cp = device.cupy()
    if name == "bfloat16":
        return (storage.view(cp.uint16).astype(cp.uint32) << 16).view(cp.float32).astype(cp.float64)
    return storage.view({"float16": cp.float16, "float32": cp.float32}[name]).astype(cp.float64)


def narrow(values, name):
    """Return fp32 numbers in the storage of a high-precision dtype; bfloat16 is truncated, which operands allow."""
    cp = device.cupy()
    if name == "bfloat16":
        return (values.astype(cp.float32).view(cp.uint32) >> 16).astype(cp.uint16)
    return values.astype({"float16": cp.float16, "float32": cp.float32}[name])


class Case:
    """A product with random operands, and its result in float64."""

    kernel = sm90_decode.SM90_DECODE

    def __init__(
        self, m, n, k, modes=("row", "row"), *, a="e4m3", b="e4m3", out="bfloat16", bias="", gap=0, span=1.0,
        size=1.0, fast=True, invariant=False, seed=0, ldo=None, shift=0,
    ):  # fmt: skip
        cp = device.cupy()
        rng = cp.random.default_rng(seed)
        ld = -(-k // 16) * 16 + gap
        self.m, self.n, self.out_name, self.cp = m, n, out, cp
        limit = {"e4m3": 0x7E, "e5m2": 0x7B}

        def codes(rows, name):
            low = rng.integers(0, limit[name] - 40, (rows, ld), cp.int32)
            return (low | rng.integers(0, 2, (rows, ld), cp.int32) << 7).astype(cp.uint8)

        self.a, self.b = codes(m, a), codes(n, b)
        self.ldo, self.shift = ldo or n + (gap and 8), shift * ITEMSIZE[out]
        out_alignment = math.gcd(16, self.ldo * ITEMSIZE[out], self.shift)
        blocks = -(-k // 128)
        shapes = {"tensor": (1, 1), "row": (None, 1), "group": (None, blocks), "block": (-(-n // 128), blocks)}
        factors, self.scales, strides = [], [], []
        for rows, mode, usual in ((m, modes[0], span * size), (n, modes[1], 1 / span)):
            shape = tuple(rows if extent is None else extent for extent in shapes[mode])
            signs = cp.where(rng.random(shape) < 0.3, -1, 1)
            scale = ((rng.random(shape, dtype=cp.float32) + 0.5) * signs * usual).astype(cp.float32)
            scale = cp.asfortranarray(scale) if mode == "group" and seed % 2 else scale
            self.scales.append(scale)
            steps = zip(shape, scale.strides, strict=True)
            strides.append(tuple(0 if extent == 1 else step // 4 for extent, step in steps))
            repeats = (-(-rows // shape[0]) if mode != "block" else 128, -(-k // shape[1]) if shape[1] == 1 else 128)
            factors.append(cp.repeat(cp.repeat(scale.astype(cp.float64), repeats[0], 0), repeats[1], 1)[:rows, :k])
        self.bias = narrow((rng.random(n, dtype=cp.float32) - 0.5) * 100, bias) if bias else None
        x, w = decode(self.a, FORMATS[a])[:, :k] * factors[0], decode(self.b, FORMATS[b])[:, :k] * factors[1]
        self.want, self.terms = x @ w.T, abs(x) @ abs(w).T
        if self.bias is not None:
            self.want = self.want + wide(self.bias, bias)
        self.problem = problem(
            m, n, k, a=FORMATS[a], b=FORMATS[b], out=out, scale_a=modes[0], scale_b=modes[1],
            scale_a_strides=strides[0], scale_b_strides=strides[1], bias=bias, use_fast_accum=fast,
            batch_invariant=invariant, lda=ld, ldb=ld, ldo=self.ldo, target=device.target(0),
            alignment=out_alignment, codes_alignment=16, out_alignment=out_alignment,
        )  # fmt: skip

    def launch(self, plan):
        """Return the launch of the product, with a given config if there is one."""
        assert self.kernel.refusal(self.problem) is None
        return sm90_decode.decode(self.problem, plan) if plan else self.kernel.plan(self.problem)

    def run(self, stream=None, plan=None):
        """Run the product, with a given config if there is one; return the result's storage, poisoned before."""
        cp = self.cp
        row = self.ldo * ITEMSIZE[self.out_name]
        storage = cp.full(self.shift + self.m * row, 0xFF, cp.uint8)[self.shift :].reshape(self.m, row)
        at = cp.cuda.get_current_stream() if stream is None else stream
        bias = self.bias.data.ptr if self.bias is not None else 0
        scales = (scale.data.ptr for scale in self.scales)
        launch = self.launch(plan)
        launch(at.ptr, self.a.data.ptr, self.b.data.ptr, *scales, bias, storage.data.ptr, 0, 0, 0)
        return storage

    def check_a_written_weight(self):
        """Assert that the result is right if kernels write the weight and its scales right before each launch."""
        self.problem = self.problem._replace(prefetch_weight=False)
        first, kept = self.run(), [(x, x.copy()) for x in (self.b, self.scales[1])]
        for _ in range(20):
            for memory, _ in kept:
                memory.fill(0)
            for memory, right in kept:
                self.cp.copyto(memory, right)
            assert bool((self.run() == first).all())

    def check_a_weight_written_by_a_kernel_that_does_not_wait(self):
        """Assert that two launches are right after a kernel of fp8core that writes the weight and triggers PDL at once.

        The second launch prefetches the weight: it relies on the first launch, which must not prefetch.
        """
        cp = self.cp
        want, weight = self.run(), self.b.copy()
        copy = plan_moves(self.problem.target, (NOTHING, NOTHING), self.b.nbytes // 2)
        launches = []
        for early in (False, True):
            self.problem = self.problem._replace(prefetch_weight=early)
            launches.append(self.launch(None))
        bias = self.bias.data.ptr if self.bias is not None else 0
        scales = [scale.data.ptr for scale in self.scales]
        stream = cp.cuda.get_current_stream().ptr
        results = [cp.empty_like(want) for _ in launches]
        for _ in range(30):
            for result in (*results, self.b):
                result.fill(0)
            copy(stream, (0, 0), (0, 0), (weight.data.ptr, self.b.data.ptr), (0, 0))
            for launch, result in zip(launches, results, strict=True):
                launch(stream, self.a.data.ptr, self.b.data.ptr, *scales, bias, result.data.ptr, 0, 0, 0)
            assert all(bool((result == want)[:, : self.n * ITEMSIZE[self.out_name]].all()) for result in results)

    def check(self, plan=None):
        """Assert that each number is within its error bound, and that the gaps between rows are untouched."""
        cp = self.cp
        storage = self.run(plan=plan)
        unit = {1: cp.uint8, 2: cp.uint16, 4: cp.uint32}[ITEMSIZE[self.out_name]]
        typed = storage.view(unit)
        got = wide(cp.ascontiguousarray(typed[:, : self.n]), self.out_name)
        allowed = HALF_UNIT[self.out_name] * abs(self.want) + OF_TERMS * self.terms
        far = ~(abs(got - self.want) <= allowed + SMALLEST[self.out_name])
        assert not bool(far.any()), f"{int(far.sum())} of {far.size} for {self.problem}"
        assert bool((typed[:, self.n :] == unit(-1 & ((1 << 8 * unit().itemsize) - 1))).all())
