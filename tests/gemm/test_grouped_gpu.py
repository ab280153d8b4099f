"""Grouped products on a GPU: every able kernel, many groups of many sizes, and ends that change between replays."""

from functools import partial

import numpy as np
import pytest

import fp8core
from fp8core.kernels.grouped import sm90
from fp8core.kernels.grouped.table import GROUPED_MM
from fp8core.problem import GroupedMm
from fp8core.runtime import device
from support import gpu_products
from support.gpu_products import EXACT, FAST

cp = gpu_products.cp
pytestmark = pytest.mark.gpu
on_hopper = pytest.mark.skipif(not device.count() or device.target(0).arch != 90, reason="the tiles are those of sm_90")
SIZES = {
    "few": (8, 3),
    "many": (256, 5),
    "large": (5, 700),
    "more than a table of 512": (600, 2),
}
MODES = [("row", "row"), ("tensor", "tensor"), ("row", "tensor"), ("group", "block"), ("group", "group")]


class Made:
    """Operands on device 0, rows that belong to no group at the end, and the result in float64."""

    def __init__(
        self, groups, most, n, k, modes=("row", "row"), *, out="bfloat16", bias="", seed=0, fast=False, layout="k"
    ):
        rng = np.random.default_rng([seed, groups, most, n, k])
        counts = rng.integers(0, 2 * most, groups) * (rng.random(groups) < 0.8)
        self.ends = np.cumsum(counts)
        self.rows, blocks = int(self.ends[-1]) + 7, -(-k // 128)
        name = gpu_products.e4m3()
        self.a = gpu_products.codes(rng, self.rows, k, k, name)
        self.weight = gpu_products.codes(rng, groups * n, k, k, name).reshape(groups, n, k)
        of_a, of_b = modes
        scale_a = rng.uniform(0.01, 0.1, {"tensor": (1, 1), "row": (self.rows, 1)}.get(of_a, (self.rows, blocks)))
        down = {"tensor": 1, "row": n, "group": n, "block": -(-n // 128)}[of_b]
        scale_b = rng.uniform(0.01, 0.1, (groups, down, blocks if of_a == "group" else 1))
        self.scale_a, self.scale_b = (cp.asarray(x.astype(np.float32)) for x in (scale_a, scale_b))
        if layout == "mn":
            wide = cp.full((self.scale_a.shape[1], -(-self.rows // 4) * 4), cp.nan, cp.float32)
            wide[:, : self.rows] = self.scale_a.T
            self.scale_a = wide.T[: self.rows]
        self.bias = None if not bias else cp.asarray(rng.standard_normal((groups, n)).astype(bias))
        self.offs, self.name, self.out, self.fast = cp.asarray(self.ends.astype(np.int32)), name, out, fast

    def operands(self):
        codes = [fp8core.Float8Array(x, self.name) for x in (self.a, self.weight)]
        return (*codes, self.scale_a, self.scale_b)

    def keywords(self):
        return {"offs": self.offs, "bias": self.bias, "out_dtype": self.out, "use_fast_accum": self.fast}

    def problem(self) -> GroupedMm:
        return fp8core.explain(fp8core.grouped_scaled_mm_nt, *self.operands(), **self.keywords()).problem

    def want(self, ends=None):
        """Return the exact result of the rows that belong to a group."""
        ends = self.ends if ends is None else ends
        k, parts, start = self.a.shape[1], [], 0
        for group, end in enumerate(map(int, ends)):
            scale_a = self.scale_a[start:end] if len(self.scale_a) > 1 else self.scale_a
            scale_b = self.scale_b[group]
            n = self.weight.shape[1]
            if scale_a.shape[1] > 1:
                scale_a = cp.repeat(scale_a, 128, 1)[:, :k]
                scale_b = cp.repeat(cp.repeat(scale_b, 1 if len(scale_b) == n else 128, 0)[:n], 128, 1)[:, :k]
            left = gpu_products.decode(self.a[start:end], self.name) * scale_a
            right = gpu_products.decode(self.weight[group], self.name) * scale_b
            part = left @ right.T
            parts.append(part if self.bias is None else part + self.bias[group])
            start = end
        return cp.concatenate(parts)

    def launch(self, plan):
        """Return what a plan writes, as float64, after checking that it writes nothing after the last end."""
        n = self.weight.shape[1]
        size = 4 if self.out == "float32" else 2
        out = cp.full((self.rows, n * size), gpu_products.POISON, cp.uint8)
        bias = 0 if self.bias is None else self.bias.data.ptr
        vectors = self.scale_a.data.ptr, self.scale_b.data.ptr, bias
        plan(
            cp.cuda.get_current_stream().ptr,
            self.a.data.ptr,
            self.weight.data.ptr,
            *vectors,
            self.offs.data.ptr,
            out.data.ptr,
        )
        assert (out[int(self.offs[-1]) :] == gpu_products.POISON).all()
        return gpu_products.wide(out, self.out)

    def check(self, plan):
        want = self.want()
        got = self.launch(plan)[: len(want)]
        assert float(cp.linalg.norm(got - want)) <= (FAST if self.fast else EXACT) * float(cp.linalg.norm(want))


@pytest.mark.parametrize("layout", ["k", "mn"])
@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize("size", SIZES)
def test_every_able_kernel(size, modes, layout):
    if layout == "mn" and modes[0] != "group":
        return
    groups, most = SIZES[size]
    made = Made(groups, most, 256, 384, modes, layout=layout)
    able = [kernel for kernel in GROUPED_MM.kernels if kernel.refusal(made.problem()) is None]
    assert "generic_grouped" in {kernel.name for kernel in able}
    for kernel in able:
        made.check(kernel.plan(made.problem()))


@on_hopper
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block"), ("group", "group")], ids="-".join)
@pytest.mark.parametrize("fast", [True, False])
def test_every_tile(modes, fast):
    made = Made(6, 260, 520, 1040, modes, fast=fast, bias="float32", seed=3)
    problem = made.problem()
    for tile in sm90.candidates(problem):
        made.check(partial(sm90.plan_grouped, tile=tile)(problem))


@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", ["", "float32"])
@pytest.mark.parametrize(("n", "k"), [(515, 333), (516, 336), (129, 1040), (8, 16), (1, 1)])
def test_odd_extents(n, k, out, bias):
    made = Made(9, 50, n, k, out=out, bias=bias, seed=n)
    for kernel in GROUPED_MM.kernels:
        if kernel.refusal(made.problem()) is None:
            made.check(kernel.plan(made.problem()))


@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")], ids="-".join)
def test_a_graph_reads_the_ends_at_each_replay(modes):
    made = Made(16, 40, 256, 512, modes, seed=1)
    out = cp.full((made.rows, 256), cp.nan, cp.float32)
    call = partial(fp8core.grouped_scaled_mm_nt, *made.operands(), offs=made.offs, out_dtype="float32", out=out)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        for seed in range(3):
            ends = np.sort(np.random.default_rng(seed).integers(0, made.rows + 1, 16))
            made.offs.set(ends.astype(np.int32))
            out.fill(cp.nan)
            graph.launch()
            stream.synchronize()
            want = made.want(ends)
            assert bool(cp.isnan(out[int(ends[-1]) :]).all())
            assert float(cp.linalg.norm(out[: len(want)] - want)) <= 2e-3 * float(cp.linalg.norm(want))


@on_hopper
def test_the_ends_may_be_written_by_the_preceding_kernel():
    made = Made(32, 20, 512, 1024, seed=2)
    want = made.want()
    wrong = cp.zeros(32, cp.int32)
    right = made.offs.copy()
    for _ in range(50):
        made.offs[...] = wrong
        made.offs[...] = right  # in the launch before
        got = fp8core.grouped_scaled_mm_nt(*made.operands(), offs=made.offs, out_dtype="float32")
        assert float(cp.linalg.norm(got[: len(want)] - want)) <= 2e-3 * float(cp.linalg.norm(want))
