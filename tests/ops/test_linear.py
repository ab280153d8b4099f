"""The ways to run a linear layer: which one a problem gets and why, and on a GPU one launch against two, bit for bit."""

import itertools

import pytest

import fp8core
from fp8core import GROUP_128, PER_TENSOR, PER_TOKEN
from fp8core.core.scaling import EPS
from fp8core.kernels.gemm.sm90 import decode_channels_config, decode_config
from fp8core.kernels.gemm.sm90.decode import config_for, decode
from fp8core.kernels.gemm.sm90.decode_config import for_linear
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.linear.fused import MOST_ELEMENTS, fused_config, plan_fused, row_teams, vectors
from fp8core.kernels.linear.overlapped import PRODUCER_BYTES, plan_behind_producer, plan_overlapped
from fp8core.kernels.linear.table import LINEAR
from fp8core.problem import Linear, Quantize, ScaledMm, Target
from fp8core.runtime import jit
from fp8core.runtime.plans import QuantizeNumbers
from gemm.test_sm90_decode import asked  # noqa: F401
from support.engines import fresh
from support.recorder import Recorder

H200 = Target("cuda", 90, 0, 132, 32, 227 << 10)
INF = float("inf")


def problem(m, n, k, *, static=False, x="bfloat16", alignment=16, group=PER_TOKEN, scale_ub=INF, **fields):
    """Return a layer of aligned matrices, per token or with a given scale per tensor."""
    quantize = Quantize(H200, x, "float8_e4m3fn", group, static, "float32", "k", k, alignment)
    basis = {
        "target": H200,
        "a": "float8_e4m3fn",
        "b": "float8_e4m3fn",
        "out": "bfloat16",
        "scale_a": "tensor" if static else "row",
        "scale_b": "row",
        "scale_a_strides": (0, 0) if static else (1, 0),
        "scale_b_strides": (1, 0),
        "bias": "",
        "out_scale": False,
        "amax": False,
        "use_fast_accum": True,
        "batch_invariant": False,
        "lda": k,
        "ldb": k,
        "ldo": n,
        "alignment": 16,
        "prefetch_weight": True,
    }
    return Linear(quantize, ScaledMm(m=m, n=n, k=k, **{**basis, **fields}), k, scale_ub)


SHAPES = ((1, 4096, 4096), (2, 6144, 4096), (1, 7168, 16384), (3, 2112, 1024), (8, 28672, 1024), (1, 100, 16))
WAYS = list(itertools.product(SHAPES, (False, True), (False, True)))


@pytest.mark.parametrize(("shape", "static", "invariant"), WAYS)
def test_the_product_lies_as_that_of_two_launches_and_fits(shape, static, invariant):
    layer = problem(*shape, static=static, batch_invariant=invariant)
    m, _, k = shape
    plan, own, side = fused_config(layer), for_linear(config_for(layer.product)), decode_config.width(m)
    assert plan._replace(a_stages=0) == own._replace(a_stages=0)
    chunks = -(-k // decode_config.BLOCK_K)
    assert plan.a_stages * plan.split_k >= chunks
    team = 128 * plan.m_warpgroups * plan.k_warpgroups // row_teams(layer)
    assert m <= row_teams(layer)
    assert team * vectors(layer) * 8 * (plan.split_k if static else 1) >= k
    depth = decode_config.stages(plan, side, 0, H200)
    asked = decode_config.dynamic_bytes(plan, side, 0, depth, H200)
    assert decode_config.ring_bytes(plan, side, depth) <= asked
    assert plan.ctas_per_sm * depth * plan.tile * decode_config.BLOCK_K >= 80 << 10


@pytest.mark.parametrize("static", [False, True])
def test_few_elements_take_one_launch(static):
    for m, n, k in SHAPES:
        assert LINEAR.explain(problem(m, n, k, static=static)).chosen == "fused"


@pytest.mark.parametrize(
    ("shape", "fields", "words", "instead"),
    [
        ((1, 4096, 4 * MOST_ELEMENTS), {}, "elements", "overlapped"),
        ((16, 4096, 4096), {}, "elements", "overlapped"),
        ((1, 4096, 4096), {"x": "float32"}, "float32", "overlapped"),
        ((1, 4096, 4096), {"alignment": 8}, "aligned to 8", "overlapped"),
        ((1, 4096, 4096), {"group": PER_TENSOR, "scale_a": "tensor"}, "per token", "overlapped"),
        ((1, 4096, 4096), {"group": GROUP_128, "scale_a": "group", "scale_b": "block"}, "per token", "overlapped"),
        ((1, 4096, 4096), {"scale_ub": None}, "scale_ub", "overlapped"),
        ((65, 4096, 16), {"batch_invariant": True}, "m=65", "sequential"),
        ((1, 4096, 4096), {"target": H200._replace(arch=100)}, "sm90_decode", "sequential"),
        ((1, 4096, 4096), {"a": "float8_e5m2", "b": "float8_e5m2"}, "sm90_decode", "sequential"),
        ((1, 4096, 4104), {}, "sm90_decode", "sequential"),
    ],
)
def test_it_says_why_it_takes_two_launches(shape, fields, words, instead):
    got = LINEAR.explain(problem(*shape, **fields))
    assert got.chosen == instead
    assert words in got.verdicts[0].reason


def test_in_a_chain_there_is_room_for_the_quantization_and_for_what_it_asks():
    for (n, k), side in itertools.product(((4096, 4096), (6144, 4096), (7168, 16384)), decode_config.WIDTHS):
        plan = decode_channels_config.cheapest(n, k, decode_channels_config.cost_model(side, False), H200)
        behind = for_linear(plan)
        depth = decode_config.stages(behind, side, 0, H200)
        assert 0 < behind.prefetch_chunks < depth
        asked = decode_config.dynamic_bytes(behind, side, 0, depth, H200)
        block = asked + decode_config.fixed_bytes(behind, side, 0, depth) + 1024
        assert behind.ctas_per_sm * block + decode_config.QUANTIZER_BYTES <= H200.shared_bytes + 1024


@pytest.mark.parametrize("m", [1, 16, 64])
def test_a_product_behind_a_producer_leaves_room_and_has_the_bits_of_the_product_alone(m, monkeypatch):
    found = []

    def prepare(target, source, entry, constants, arguments, **launch):
        found.append((constants, launch["shared_bytes"]))
        return Recorder(entry, [])

    monkeypatch.setattr(jit, "prepare", prepare)
    alone = problem(m, 28672, 4096).product
    plan_behind_producer(alone)
    decode(alone)
    (behind, rest), (other, everything) = found
    assert 0 < behind["FP8_PREFETCH_CHUNKS"] < behind["FP8_STAGES"]
    assert rest < everything or behind["FP8_STAGES"] < other["FP8_STAGES"]
    assert (behind["FP8_AHEAD_CHUNKS"] < other["FP8_AHEAD_CHUNKS"]) == (m > 32)  # small kernels of more rows would wait
    assert behind["FP8_AHEAD_CHUNKS"] > 0
    free = dict.fromkeys(("FP8_PREFETCH_CHUNKS", "FP8_AHEAD_CHUNKS", "FP8_STAGES"), 0)
    assert {**behind, **free} == {**other, **free}


@pytest.mark.parametrize(
    "shape", [(7168, 8192), (8192, 3584), (57344, 8192), (6144, 4096), (8192, 1024), (13312, 16384)]
)
@pytest.mark.parametrize("m", [16, 64])
def test_room_for_a_quantization_of_64_rows_costs_nothing_of_the_weight_in_flight(m, shape, monkeypatch):
    found = []

    def prepare(target, source, entry, constants, arguments, **launch):
        found.append((constants, launch))
        return Recorder(entry, [])

    monkeypatch.setattr(jit, "prepare", prepare)
    layer = problem(m, *shape)
    plan_overlapped(layer)
    decode(layer.product)
    (constants, launch), (alone, _) = found
    config, stages = config_for(layer.product), constants["FP8_A_STAGES"]
    if m <= 32:
        assert stages == alone["FP8_A_STAGES"]
        return
    assert min(6, alone["FP8_A_STAGES"]) <= stages <= alone["FP8_A_STAGES"]
    assert constants["FP8_STAGES"] >= alone["FP8_STAGES"]
    static = decode_config.fixed_bytes(config._replace(a_stages=stages), 64, 0, constants["FP8_STAGES"])
    block = launch["shared_bytes"] + static + 1024
    assert config.ctas_per_sm * block + PRODUCER_BYTES <= H200.shared_bytes + 1024


def test_a_product_of_another_kernel_is_planned_as_ever(monkeypatch):
    monkeypatch.setattr(SCALED_MM, "plan", lambda problem: problem)
    many = problem(100, 6144, 4096).product
    assert plan_behind_producer(many) == many


def test_explain_tells_the_way():
    layer = fp8core.Fp8Linear.from_weight(fresh((64, 256)))
    got = layer.explain(fresh((1, 256)))
    assert [type(step.problem).__name__ for step in got.before] == ["Quantize", "Linear"]
    assert got.before[1].chosen == "sequential"
    assert "fused" in str(got)


@pytest.mark.parametrize("stable", [False, True])
def test_only_a_weight_that_may_be_is_prefetched(stable, asked):
    launch = plan_fused(problem(1, 4096, 4096, prefetch_weight=stable))
    launch(7, *range(16, 160, 16))
    assert launch.prefetches_weight
    ((entry, stream, arguments),) = asked
    assert (entry, stream, arguments.x, arguments.prefetch_weight) == ("sm90_decode", 7, 16, stable)


# ---- on the device

ONE, CHAINED, TWO = (row.name for row in LINEAR.kernels)


class Layer:
    """A layer, and each way to run an input through it."""

    def __init__(self, n, k, *, given=None, dtype="bfloat16", **options):
        self.torch = pytest.importorskip("torch")
        self.dtype, self.n, self.k = getattr(self.torch, dtype), n, k
        self.given = None if given is None else self.torch.tensor([given], device="cuda")
        self.torch.manual_seed(n + k)
        weight = self.torch.randn(n, k, device="cuda", dtype=self.dtype)
        group_shape = PER_TOKEN if given is None else PER_TENSOR
        self.layer = fp8core.Fp8Linear.from_weight(weight, input_scale=self.given, group_shape=group_shape, **options)

    def input(self, m, gap=0):
        """Return rows of different sizes, one of zeros where there are some, ``gap`` elements apart."""
        x = self.torch.randn(m, self.k + gap, device="cuda") * self.torch.rand(m, 1, device="cuda") * 20
        x[m // 2 :][1:2] = 0
        return x.to(self.dtype)[:, : self.k]

    def problem(self, x):
        told = self.layer.explain(x)
        return next(step.problem for step in (*told.before, told) if isinstance(step.problem, Linear))

    def run(self, name, x, scale_ub=INF):
        """Return the bits that one row of the table gives; what it writes is poisoned before."""
        torch, layer, m = self.torch, self.layer, len(x)
        row = next(row for row in LINEAR.kernels if row.name == name)
        problem = self.problem(x)._replace(scale_ub=scale_ub)
        assert row.refusal(problem) is None
        quantize, product = row.plan(problem)
        codes = torch.full((m * self.k,), 0x7F, dtype=torch.uint8, device="cuda")
        scale = torch.full((m,), float("nan"), device="cuda") if self.given is None else self.given
        out = torch.full((m, self.n), float("nan"), dtype=self.dtype, device="cuda")
        stream, a = torch.cuda.current_stream().cuda_stream, x
        if quantize is not None:
            strides = x.stride(0), self.k, *problem.product.scale_a_strides
            launch = quantize.bind(QuantizeNumbers(*strides, m, m, scale_ub, EPS))
            launch(stream, x.data_ptr(), codes.data_ptr(), scale.data_ptr(), 0)
            a = codes
        weight = layer.weight.data_ptr(), scale.data_ptr(), layer.weight_scale.data_ptr()
        product(stream, a.data_ptr(), *weight, 0, out.data_ptr(), 0, 0, 0)
        return out.view(torch.int16)

    def check(self, x, scale_ub=INF):
        want = self.run(TWO, x, scale_ub)
        for name in (ONE, CHAINED):
            got = self.run(name, x, scale_ub)
            assert bool((got == want).all()), f"{name}: {int((got != want).sum())} of {want.numel()} differ"


@pytest.mark.gpu
@pytest.mark.parametrize("given", [None, 0.03])
@pytest.mark.parametrize(
    ("n", "k", "rows"),
    [
        (4096, 4096, (1, 2)),
        (2112, 7168, (1,)),
        (520, 1040, (1, 2, 3, 4, 5, 7)),
        (28672, 1024, (1, 8)),
        (1000, 400, (9, 16, 20)),
        (104, 16, (1, 33, 64)),
        (7168, 16384, (1,)),
    ],
)
def test_every_way_has_the_same_bits(n, k, rows, given):
    layer = Layer(n, k, given=given)
    for m in rows:
        layer.check(layer.input(m))
        layer.check(layer.input(m, gap=24))


@pytest.mark.gpu
@pytest.mark.parametrize("given", [None, 0.0, 1e-30, 1e30, -0.5, INF])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_not_ordinary(given, dtype):
    layer = Layer(304, 1040, given=given, dtype=dtype)
    x = layer.input(5)
    x[0, 3], x[1, 1039], x[2] = INF, float("nan"), x[2] * 1e-4
    x[3, :4] = layer.torch.tensor([-0.0, 1e-7, -6e4, 448.0], dtype=x.dtype)
    layer.check(x)
    if given is None:
        layer.check(x, scale_ub=1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_layer_takes_one_launch_and_is_quantize_and_scaled_mm(dtype):
    layer = Layer(1024, 2048, dtype=dtype)
    for m in (1, 4):
        x = layer.input(m)
        assert layer.layer.explain(x).chosen == ONE
        data, scale = fp8core.quantize(x)
        want = fp8core.scaled_mm_nt(data, layer.layer.weight, scale, layer.layer.weight_scale, out_dtype=dtype)
        for _ in range(3):
            assert layer.torch.equal(layer.layer(x), want)


@pytest.mark.gpu
def test_rows_that_are_not_aligned_take_two_launches():
    layer = Layer(512, 1024)
    x = layer.input(2, gap=8).new_zeros(2, 1027)[:, 1:1025]
    x.copy_(layer.input(2))
    assert "aligned" in layer.layer.explain(x).before[1].verdicts[0].reason
    assert layer.torch.equal(layer.layer(x), layer.layer(x.contiguous()))


@pytest.mark.gpu
def test_a_row_has_its_bits_whatever_the_batch():
    layer = Layer(2112, 1024, batch_invariant=True)
    x = layer.input(100)
    full = layer.layer(x)
    for m, way in ((1, ONE), (3, ONE), (8, ONE), (9, CHAINED), (64, CHAINED)):
        told = layer.layer.explain(x[:m])
        assert way in (told.chosen, *(step.chosen for step in told.before))
        assert layer.torch.equal(layer.layer(x[:m]), full[:m])


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k"), [(1, 4096), (16, 4096), (64, 1024)])
def test_equal_bits_under_load_and_in_graphs_with_other_inputs(m, k):
    layer = Layer(4096, k)
    torch, inputs = layer.torch, [layer.input(m) for _ in range(3)]
    wanted = [layer.layer(x).clone() for x in inputs]
    noise, streams = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda"), [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(streams[2]):
            noise += 1
        results = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(layer.layer(x))
        torch.cuda.synchronize()
        assert all(torch.equal(result, want) for result, want in zip(results, wanted, strict=True))
    x, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = [layer.layer(x) for _ in range(5)]
    for given, want in zip(inputs, wanted, strict=True):
        x.copy_(given)
        graph.replay()
        assert all(torch.equal(result, want) for result in y)


@pytest.mark.gpu
def test_a_chain_reads_what_the_layer_before_wrote():
    first, second = Layer(1024, 2048), Layer(2048, 1024)
    torch, x = first.torch, first.input(2)
    want = x
    for _ in range(4):
        want = second.layer(first.layer(want)) / 1024
        torch.cuda.synchronize()
    for _ in range(50):
        y = x
        for _ in range(4):
            y = second.layer(first.layer(y)) / 1024
        assert torch.equal(y, want)
