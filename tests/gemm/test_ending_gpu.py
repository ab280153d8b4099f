"""Products that end in an activation and in what out held before, by every able row on a GPU."""

from functools import cache

import numpy as np
import pytest

import fp8core
from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.gemm.sm90 import tiled, tiled_cost
from fp8core.kernels.gemm.sm90.decode_unaligned import decode_unaligned, in_few_panels
from fp8core.kernels.gemm.table import SCALED_MM
from gemm.test_ending import ENDINGS, FORMULA, ROUNDING, ended
from gemm.test_generic_gpu import FN, OUT_SCALE, POISON, SPECIFIED, Operands
from support import reference
from support.emulation.running import FLOATS

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy")


class Ended:
    """A product whose values are some tens at most, and what out holds before it."""

    def __init__(self, shape, modes, offsets=(0, 0, 0), out="bfloat16", bias="", amax=False) -> None:
        self.made = made = Operands(shape, modes, offsets, out, bias, amax=amax, fast=False)
        m, n, k = shape
        factor = 2.0 ** -round(np.log2(16 * max(k, 1) ** 0.5))
        added = 0 if made.bias is None else made.bias.astype(cp.float64)
        made.scale_a *= factor
        made.want = (made.want - added) * factor + added
        made.magnitude *= factor
        self.value = made.want.get()
        values = np.random.default_rng(m).standard_normal((m, n)) * 2
        self.before = values.astype(FLOATS[out]) if out in FLOATS else np.zeros((m, n), np.uint8)

    def run(self, plan, problem):
        """Return the result, having looked at what lies around and between its rows."""
        made, p, size = self.made, problem, ITEMSIZE[problem.out]
        begin, end = made.at_out, made.at_out + p.m * p.ldo * size
        made.storage[...] = POISON
        rows = made.storage[begin:end].reshape(p.m, p.ldo * size)
        rows[:, : p.n * size] = cp.asarray(self.before.view(np.uint8).reshape(p.m, -1))
        scratch = cp.full(plan.scratch_bytes + 1, POISON, cp.uint8)
        at = [x.data.ptr if x is not None else 0 for x in (made.scale_a, made.scale_b, made.bias)]
        at_result = [x.data.ptr if x is not None else 0 for x in (made.out_scale, made.amax)]
        a, b = made.a.data.ptr + made.offsets[0], made.b.data.ptr + made.offsets[1]
        stream = cp.cuda.get_current_stream().ptr
        plan(stream, a, b, *at, made.storage.data.ptr + made.at_out, *at_result, scratch.data.ptr)
        assert (made.storage[:begin] == POISON).all()
        assert (made.storage[end:] == POISON).all()
        assert (rows[:, p.n * size :] == POISON).all()
        return cp.ascontiguousarray(rows[:, : p.n * size]).get().view(FLOATS.get(p.out, np.uint8))

    def check(self, kernel, activation, beta, plan=None):
        """Check a kernel against float64, and against its own plain product: its end alone is exact to its rounding."""
        plan = plan or kernel.plan
        p = self.made.problem._replace(activation=activation or "", beta=beta)
        got = self.run(plan(p), p).astype(np.float64)
        want = ended(self.value, self.before, activation, beta)
        error = np.linalg.norm(got - want)
        bound = SPECIFIED * np.linalg.norm(np.abs(self.value) + np.abs(beta * self.before.astype(np.float64)))
        assert error <= bound, (kernel.name, error, bound)
        plain = self.made.problem
        if plain.out == "float32" and not kernel.name.startswith(("cublaslt", "realigned")):  # which may choose anew
            value = self.run(plan(plain), plain)
            self.compare(kernel.name, got, ended(value, self.before, activation, beta))

    def compare(self, name, got, want):
        error = np.abs(got - want)
        assert (error <= (ROUNDING[self.made.problem.out] + FORMULA) * np.abs(want) + 2e-6).all(), (name, error.max())


CASES = [
    ((16, 264, 512), ("row", "row"), (0, 0, 0), "float32"),
    ((50, 1288, 4096), ("group", "block"), (0, 0, 8), "bfloat16"),
    ((200, 520, 640), ("tensor", "tensor"), (0, 0, 0), "float32"),
    ((300, 264, 384), ("group", "block"), (0, 0, 8), "float16"),
    ((150, 131, 256), ("row", "tensor"), (0, 0, 0), "float32"),
    ((130, 71, 333), ("row", "row"), (1, 2, 1), "bfloat16"),
    ((60, 451, 262), ("row", "tensor"), (1, 2, 1), "float32"),
    ((12, 1999, 641), ("group", "group"), (3, 1, 1), "bfloat16"),
    ((29, 260, 1001), ("group", "block"), (0, 0, 1), "float16"),
    ((5, 700, 333), ("tensor", "row"), (0, 3, 0), "float32"),
    ((120, 451, 4362), ("row", "tensor"), (1, 2, 1), "float32"),
    ((90, 1999, 641), ("group", "group"), (3, 1, 1), "bfloat16"),
    ((128, 260, 1001), ("group", "block"), (0, 0, 1), "float16"),
]


@pytest.mark.parametrize(("shape", "modes", "offsets", "out"), CASES, ids=lambda x: "x".join(map(str, x)))
def test_every_row_ends_in_both(shape, modes, offsets, out):
    case = CASES.index((shape, modes, offsets, out))
    for activation, beta in ENDINGS[case % 2 :: 2]:  # each with half of the shapes
        made = Ended(shape, modes, offsets, out, "float32" if activation else "")
        rows = list(SCALED_MM.ranking(made.made.problem._replace(activation=activation or "", beta=beta)))
        assert {"generic_decode", "generic_mma"} <= {row.name for row in rows}
        for row in rows:
            made.check(row, activation, beta)
        unaligned = [row for row in rows if row.name == "sm90_decode_unaligned"]
        for row in unaligned if 64 < shape[0] <= 128 else ():  # which it may have run in several panels
            made.check(row, activation, beta, lambda p: decode_unaligned(p, in_few_panels(p)))


ALONE = [tile for tile in tiled_cost.COSTS if tile.cluster == 1]
"""Clusters of tiles are not offered with a beta."""


@pytest.mark.parametrize("tile", ALONE, ids=str)
def test_every_tile_of_sm90_adds(tile):
    """More tiles than a device has multiprocessors, stored by TMA and, where n is odd, element by element."""
    number = ALONE.index(tile)
    n, out = (1000, 1001)[number % 2], ("bfloat16", "float32")[number // 2 % 2]
    if tiled.SM90_TILED.refusal(Ended((8, 16, 16), ("row", "row")).made.problem) is not None:
        pytest.skip("the device has no wgmma")
    promoted = bool(tiled_cost.COSTS[tile].promoted)
    of = ("row", "row") if promoted else ("tensor", "tensor")
    made = big(n, of, out)
    made.made.problem = made.made.problem._replace(use_fast_accum=not promoted)
    made.check(tiled.SM90_TILED, "silu", -0.5, lambda p: tiled.tiled(p, tile))


@cache
def big(n, modes, out):
    return Ended((2600, n, 272), modes, (0, 0, 0), out, "float32")


@pytest.mark.parametrize("m", [9, 100])
def test_codes_and_amax_are_those_of_the_activation(m):
    for modes in (("tensor", "tensor"), ("row", "row"), ("group", "block")):
        made = Ended((m, 72, 320), modes, out=FN, bias="float32" if m < 64 else "", amax=True)
        p = made.made.problem._replace(activation="gelu_tanh")
        want = reference.activated(made.value, "gelu_tanh")
        for row in SCALED_MM.ranking(p):
            codes = made.run(row.plan(p), p)
            values = reference.decode(codes, FN).astype(np.float64) * float(OUT_SCALE)
            step = 2.0**-4 * np.abs(want) * 1.01 + SPECIFIED * made.made.magnitude.get() + 2.0**-10
            assert (np.abs(values - want) <= step).all(), row.name
            assert abs(float(made.made.amax[0]) / np.abs(want).max() - 1) < SPECIFIED, row.name


@pytest.mark.parametrize("group", [fp8core.PER_TOKEN, fp8core.GROUP_128], ids=str)
@pytest.mark.parametrize(("m", "activation"), [(1, "gelu"), (16, "gelu_tanh"), (64, "silu")])
def test_layers_end_in_an_activation(m, activation, group):
    """By the kernels of layers of few rows, too; x in 16 bits, to be quantized."""
    torch = pytest.importorskip("torch")
    x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1280, 4096, device="cuda", dtype=torch.bfloat16) / 32
    of_weight = fp8core.PER_CHANNEL if group == fp8core.PER_TOKEN else fp8core.BLOCK_128
    options = {"weight_group_shape": of_weight, "group_shape": group, "use_fast_accum": False}
    plain = fp8core.Fp8Linear.from_weight(weight, **options, out_dtype="float32")
    layer = fp8core.Fp8Linear.from_weight(weight, **options, out_dtype="float32", activation=activation)
    for _ in range(2):  # the second reads its weight early
        got = layer(x).cpu().numpy().astype(np.float64)
    want = reference.activated(plain(x).cpu().numpy(), activation)
    assert (np.abs(got - want) <= FORMULA * np.abs(want) + 2e-6).all()


def test_what_is_added_is_read_when_the_stream_is_there():
    """out is still being written by the kernel before, on a stream of torch's; a replayed graph adds once more."""
    torch = pytest.importorskip("torch")
    a, weight = (fp8core.quantize(torch.randn(shape, device="cuda")) for shape in ((48, 4096), (2048, 4096)))
    plain = fp8core.scaled_mm_nt(a, weight, out_dtype="float32")
    out, stream = torch.zeros(48, 2048, device="cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    version = out._version
    with torch.cuda.stream(stream):
        for _ in range(4):
            out.add_(1.0)
            fp8core.scaled_mm_nt(a, weight, beta=1.0, out=out, out_dtype="float32")
        assert out._version == version + 8
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            fp8core.scaled_mm_nt(a, weight, beta=1.0, out=out, out_dtype="float32")
        graph.replay()
        graph.replay()
    stream.synchronize()
    assert torch.allclose(out, 6 * plain + 4, rtol=1e-5, atol=1e-3)
