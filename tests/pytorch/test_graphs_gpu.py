"""On a GPU: reduce-overhead, graphs made by hand, and compiled models, against eager calls bit for bit."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the skip

import fp8core  # noqa: E402
from fp8core.torch import quantize_model_, warm_up  # noqa: E402
from pytorch.cases import CASES, fresh_dynamo  # noqa: E402, F401
from pytorch.tensors import bits, ends, stacked, wide  # noqa: E402

pytestmark = pytest.mark.gpu

WIDTH = 512


class Layer(nn.Module):
    """What a decoder layer does beside attention: a norm that writes the residual stream, and a gated MLP."""

    def __init__(self, scheme):
        super().__init__()
        self.norm = nn.Parameter(wide(WIDTH, seed=2), requires_grad=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH, bias=False, dtype=torch.bfloat16),
            nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16),
        )
        for seed, layer in enumerate(self.mlp):
            with torch.no_grad():
                layer.weight.copy_(wide(*layer.weight.shape, seed=seed) / WIDTH**0.5)
        quantize_model_(self, scheme=scheme)
        self.groups = self.mlp[0].group_shape

    def forward(self, x, residual):
        q = fp8core.rms_norm_quant(x, self.norm, 1e-6, residual=residual, group_shape=self.groups)
        q = fp8core.silu_and_mul_quant(self.mlp[0](q), group_shape=self.groups)
        return self.mlp[1](q), residual


class Decoder(nn.Module):
    def __init__(self, scheme):
        super().__init__()
        self.layers = nn.ModuleList(Layer(scheme) for _ in range(3))

    def forward(self, x):
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x + residual


def decoder(scheme):
    return Decoder(scheme).cuda().eval()


def on_gpu(inputs):
    return tuple(x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs)


def on_cpu(x):
    if isinstance(x, torch.Tensor):
        return x.cpu()
    return [on_cpu(item) for item in x] if isinstance(x, (tuple, list)) else x


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_function_in_one_graph(case):
    compiled = torch.compile(case.function, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (1, 5, 16):
        eager_inputs, inputs = on_gpu(case.inputs(m)), on_gpu(case.inputs(m))
        assert bits(on_cpu(compiled(*inputs))) == bits(on_cpu(case.function(*eager_inputs)))
        assert bits(on_cpu(inputs)) == bits(on_cpu(eager_inputs)), "what was written in place"


@pytest.mark.parametrize("scheme", ["channel", "block"])
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_reduce_overhead_replays_with_new_inputs(scheme, rows):
    from torch._dynamo.utils import counters

    model = decoder(scheme)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    counters.clear()
    with torch.inference_mode():
        for seed in range(6):
            x = wide(rows, WIDTH, seed=seed).cuda()
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(x).clone()
            assert bits(got.cpu()) == bits(model(x).cpu())
    assert not counters["inductor"]["cudagraph_skips"]


def test_reduce_overhead_of_functions_alone_has_the_bits_of_eager_calls():
    w = fp8core.quantize(wide(WIDTH, WIDTH, seed=1).cuda())

    def step(x):
        q = fp8core.silu_and_mul_quant(x)
        return fp8core.linear(q, w)

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    with torch.inference_mode():
        for seed in range(6):
            x = wide(4, 2 * WIDTH, seed=seed).cuda()
            torch.compiler.cudagraph_mark_step_begin()
            assert bits(compiled(x).cpu()) == bits(step(x).cpu())


def test_each_replay_has_groups_of_its_own():
    """A graph reads where the groups end when it is replayed."""
    from torch._dynamo.utils import counters

    counters.clear()
    x, *weights = on_gpu((wide(16, 256), *stacked((1, -1))))

    def step(x, offs):
        a = fp8core.quantize(x)
        return fp8core.grouped_scaled_mm_nt(a, weights[0], scale_b=weights[1], offs=offs) * 2

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    with torch.inference_mode():
        for offs in (ends(16, 16), ends(3, 16), *(torch.tensor([at, 15, 16], dtype=torch.int32) for at in range(6))):
            there = offs.cuda()
            torch.compiler.cudagraph_mark_step_begin()
            assert bits(compiled(x, there).cpu()) == bits(step(x, there).cpu())
    assert not counters["inductor"]["cudagraph_skips"]


def test_each_replay_routes_its_own_tokens():
    """A graph sorts the choices that it finds when it is replayed, whether a launch of its own counts them or not."""

    def step(x, choices, shares):
        rows, _, inverse = fp8core.moe_permute(fp8core.quantize(x), choices, experts=8)
        return fp8core.moe_unpermute(rows.dequantize(torch.bfloat16), inverse, shares)

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    with torch.inference_mode():
        for tokens in (16, 3000):
            for seed in range(4):
                x, shares = on_gpu((wide(tokens, 256, seed=seed), wide(tokens, 2, seed=seed)))
                choices = torch.randint(-1, 9, (tokens, 2), generator=torch.Generator().manual_seed(seed)).cuda()
                torch.compiler.cudagraph_mark_step_begin()
                assert bits(compiled(x, choices, shares).cpu()) == bits(step(x, choices, shares).cpu())


@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_a_graph_made_by_hand_after_warming_up(scheme):
    model = decoder(scheme)
    rows = 8
    warm_up(model, rows=[rows])
    static = wide(rows, WIDTH, seed=0).cuda()
    side = torch.cuda.Stream()
    with torch.inference_mode():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(static)
        for seed in (3, 4, 5):
            x = wide(rows, WIDTH, seed=seed).cuda()
            static.copy_(x)
            result.fill_(float("nan"))
            graph.replay()
            assert bits(result.cpu()) == bits(model(x).cpu())


def test_gradients_on_a_gpu():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)).cuda()
    exact = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).cuda()
    exact.load_state_dict(model[0].state_dict())
    quantize_model_(model)
    x, twin = wide(16, WIDTH).cuda().requires_grad_(), wide(16, WIDTH).cuda().requires_grad_()
    grad = wide(16, WIDTH, seed=9).cuda()
    torch.compile(model, fullgraph=True)(x).backward(grad)
    exact(twin).backward(grad)
    assert torch.cosine_similarity(x.grad.float().flatten(), twin.grad.float().flatten(), 0) > 0.99


def test_moving_to_the_gpu_and_back():
    model = nn.Sequential(nn.Linear(WIDTH, 64, dtype=torch.bfloat16))
    quantize_model_(model)
    before = {name: bits(x) for name, x in model.state_dict().items()}
    with torch.inference_mode():
        y = model(wide(5, WIDTH))
        model.cuda()
        got = model(wide(5, WIDTH).cuda())
        torch.testing.assert_close(got.cpu(), y, rtol=0.02, atol=0.02)
        model.cpu()
        assert bits(model(wide(5, WIDTH))) == bits(y)
    assert {name: bits(x) for name, x in model.state_dict().items()} == before
