"""The ways to run a linear layer on an H100 or H200: one launch against two, bit for bit."""

import pytest

import fp8core
from fp8core import PER_TENSOR, PER_TOKEN
from fp8core.core.scaling import EPS
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.linear.table import LINEAR
from fp8core.problem import Linear
from fp8core.runtime.plans import QuantizeNumbers

pytestmark = pytest.mark.gpu

INF = float("inf")
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
        problem = self.problem(x)
        if SCALED_MM.choice(problem.product).kernel != "sm90_decode":  # whose bits those of one launch are
            assert LINEAR.choice(problem).kernel == TWO
            return
        want = self.run(TWO, x, scale_ub)
        for name in (ONE, CHAINED):
            got = self.run(name, x, scale_ub)
            assert bool((got == want).all()), f"{name}: {int((got != want).sum())} of {want.numel()} differ"


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


def test_rows_that_are_not_aligned_take_two_launches():
    layer = Layer(512, 1024)
    x = layer.input(2, gap=8).new_zeros(2, 1027)[:, 1:1025]
    x.copy_(layer.input(2))
    assert "aligned" in layer.layer.explain(x).before[1].verdicts[0].reason
    assert layer.torch.equal(layer.layer(x), layer.layer(x.contiguous()))


@pytest.mark.parametrize("given", [None, 0.03])
def test_columns_that_are_no_whole_vectors_take_two_launches(given):
    layer = Layer(1024, 1020, given=given)
    x = layer.input(4, gap=4)
    assert "multiple of 8" in layer.layer.explain(x).before[1].verdicts[0].reason
    assert layer.torch.equal(layer.layer(x), layer.layer(x.contiguous()))


def test_a_row_has_its_bits_whatever_the_batch():
    layer = Layer(2112, 1024, batch_invariant=True)
    x = layer.input(100)
    full = layer.layer(x)
    for m, way in ((1, ONE), (3, ONE), (8, ONE), (9, CHAINED), (64, CHAINED)):
        told = layer.layer.explain(x[:m])
        assert way in (told.chosen, *(step.chosen for step in told.before))
        assert layer.torch.equal(layer.layer(x[:m]), full[:m])


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
