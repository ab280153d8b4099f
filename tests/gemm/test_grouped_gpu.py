"""Grouped products on a GPU: every able kernel, many groups of many sizes, and ends that change between replays."""

from functools import partial

import numpy as np
import pytest

import fp8core
from fp8core.kernels.gemm.sm90.tiled_cost import Tile
from fp8core.kernels.grouped import sm90
from fp8core.kernels.grouped.table import GROUPED_MM
from fp8core.problem import GroupedMm
from fp8core.runtime import device
from support import gpu_products, reference
from support.engines import CupyEngine, fresh
from support.gpu_products import EXACT, FAST
from support.grouped import ends_of, exact, operands

cp = gpu_products.cp
pytestmark = pytest.mark.gpu
on_hopper = pytest.mark.skipif(not device.count() or device.target(0).arch != 90, reason="the tiles are those of sm_90")
SIZES = {
    "few": (8, 3),
    "many": (256, 5),
    "large": (5, 700),
    "more than a table of 512": (600, 2),
}
MODES = ("row-row", "tensor-each", "row-each", "group-block", "group-group")


class Made:
    """Operands on device 0, with rows that belong to no group at the end, and the result in float64."""

    def __init__(self, groups, most, n, k, mode="row-row", *, out="bfloat16", bias="", seed=0, fast=False, layout="k"):
        rng = np.random.default_rng([seed, groups, most, n, k])
        ends = ends_of(rng.integers(0, 2 * most, groups) * (rng.random(groups) < 0.8))
        self.rows, self.mode, self.out, self.fast = int(ends[-1]) + 7, mode, out, fast
        name = gpu_products.e4m3()
        self.given = operands(groups, self.rows, n, k, mode, name, name, low=0.08, high=0.8)
        self.addend = fresh((groups, n), bias, spread=0) if bias else None
        self.a, self.weight, self.scale_a, self.scale_b = self.given.on(CupyEngine())
        if layout == "mn":
            wide = cp.full((self.scale_a.shape[1], -(-self.rows // 4) * 4), cp.nan, cp.float32)
            wide[:, : self.rows] = self.scale_a.T
            self.scale_a = wide.T[: self.rows]
        self.bias = cp.asarray(self.addend) if bias else None
        self.offs, self.want = cp.asarray(ends), self.product(ends)

    def operands(self):
        return self.a, self.weight, self.scale_a, self.scale_b

    def keywords(self):
        return {"offs": self.offs, "bias": self.bias, "out_dtype": self.out, "use_fast_accum": self.fast}

    def problem(self) -> GroupedMm:
        return fp8core.explain(fp8core.grouped_scaled_mm_nt, *self.operands(), **self.keywords()).problem

    def product(self, ends):
        """Return the exact result of the rows that belong to a group."""
        return exact(self.given, self.mode, ends, self.addend)[: int(ends[-1])]

    def launch(self, plan):
        """Return what a plan writes, as float64, after checking that it writes nothing after the last end."""
        size = 4 if self.out == "float32" else 2
        out = cp.full((self.rows, self.weight.shape[1] * size), gpu_products.POISON, cp.uint8)
        vectors = (gpu_products.address(x) for x in (self.scale_a, self.scale_b, self.bias, self.offs, out))
        plan(cp.cuda.get_current_stream().ptr, self.a.codes.data.ptr, self.weight.codes.data.ptr, *vectors)
        assert (out[int(self.offs[-1]) :] == gpu_products.POISON).all()
        return cp.asnumpy(gpu_products.wide(out, self.out))

    def check(self, plan):
        error = reference.relative_error(self.launch(plan)[: len(self.want)], self.want)
        assert error <= (FAST if self.fast else EXACT)


@pytest.mark.parametrize(
    ("mode", "layout"), [*((mode, "k") for mode in MODES), ("group-block", "mn"), ("group-group", "mn")]
)
@pytest.mark.parametrize("size", SIZES)
def test_every_able_kernel(size, mode, layout):
    groups, most = SIZES[size]
    made = Made(groups, most, 256, 384, mode, layout=layout)
    able = [kernel for kernel in GROUPED_MM.kernels if kernel.refusal(made.problem()) is None]
    assert "generic_grouped" in {kernel.name for kernel in able}
    for kernel in able:
        made.check(kernel.plan(made.problem()))


@on_hopper
@pytest.mark.parametrize(
    ("mode", "layout"), [("row-row", "k"), ("group-block", "k"), ("group-block", "mn"), ("group-group", "k")]
)
@pytest.mark.parametrize("fast", [True, False])
def test_every_tile(mode, layout, fast):
    made = Made(6, 260, 520, 1040, mode, fast=fast, bias="float32", seed=3, layout=layout)
    problem = made.problem()
    for tile in sm90.candidates(problem):
        made.check(partial(sm90.plan_grouped, tile=tile)(problem))


@on_hopper
@pytest.mark.parametrize(("mode", "layout"), [("row-row", "k"), ("group-block", "mn")])
def test_every_tile_of_blocks_that_share_rows(mode, layout):
    made = Made(6, 260, 768, 8320, mode, fast=True, seed=3, layout=layout)
    problem = made.problem()
    shared = [tile for tile in sm90.candidates(problem) if sm90.shares_a(problem, tile)]
    assert {Tile(128, 128), Tile(192, 128), Tile(192, 96)} <= set(shared)
    for tile in shared:
        made.check(partial(sm90.plan_grouped, tile=tile)(problem))


@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", ["", "float32"])
@pytest.mark.parametrize(("n", "k"), [(515, 333), (516, 336), (129, 1040), (8, 16), (1, 1)])
def test_odd_extents(n, k, out, bias):
    made = Made(9, 50, n, k, out=out, bias=bias, seed=n)
    for kernel in GROUPED_MM.kernels:
        if kernel.refusal(made.problem()) is None:
            made.check(kernel.plan(made.problem()))


@pytest.mark.parametrize("mode", ["row-row", "group-block"])
def test_a_graph_reads_the_ends_at_each_replay(mode):
    made = Made(16, 40, 256, 512, mode, seed=1)
    out = cp.full((made.rows, 256), cp.nan, cp.float32)
    call = partial(fp8core.grouped_scaled_mm_nt, *made.operands(), offs=made.offs, out_dtype="float32", out=out)
    cp.cuda.Device().synchronize()
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
            want = made.product(ends)
            assert bool(cp.isnan(out[len(want) :]).all())
            assert reference.relative_error(cp.asnumpy(out[: len(want)]), want) <= EXACT


@on_hopper
def test_the_ends_may_be_written_by_the_preceding_kernel():
    made = Made(32, 20, 512, 1024, seed=2)
    wrong = cp.zeros(32, cp.int32)
    right = made.offs.copy()
    for _ in range(50):
        made.offs[...] = wrong
        made.offs[...] = right  # in the launch before
        got = fp8core.grouped_scaled_mm_nt(*made.operands(), offs=made.offs, out_dtype="float32")
        assert reference.relative_error(cp.asnumpy(got[: len(made.want)]), made.want) <= EXACT
