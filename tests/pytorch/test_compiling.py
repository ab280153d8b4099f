"""`compile_options`: layers of one input follow each other, nothing passes a write, and results stay the same."""

import shutil

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the skip

import fp8core.torch  # noqa: E402
from fp8core.torch import compile_options, compiling, quantize_model_  # noqa: E402
from fp8core.torch.adjacent import ADJACENT  # noqa: E402
from fp8core.torch.compiling import group_by_input  # noqa: E402
from pytorch.cases import fresh_dynamo  # noqa: E402, F401
from pytorch.tensors import wide  # noqa: E402

LINEAR = torch.ops.fp8core.linear.default
WIDTH = 512


def graph_of(*steps):
    """A graph of named steps: (name, target, names of arguments)."""
    graph = torch.fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("x", "y", "w0", "w1", "w2", "s")}
    for name, target, arguments in steps:
        nodes[name] = graph.call_function(target, tuple(nodes[one] for one in arguments))
        nodes[name].name = name
    graph.output(nodes[steps[-1][0]])
    return graph


def order(graph):
    return [node.name for node in graph.nodes if node.op == "call_function"]


SILU, ADD, COPY = torch.ops.aten.silu.default, torch.ops.aten.add.Tensor, torch.ops.aten.copy_.default


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        (
            [
                ("q", LINEAR, "x w0 s"),
                ("a", SILU, "q"),
                ("k", LINEAR, "x w1 s"),
                ("b", SILU, "k"),
                ("v", LINEAR, "x w2 s"),
            ],
            "q k v a b",
        ),
        ([("q", LINEAR, "x w0 s"), ("a", SILU, "q"), ("k", LINEAR, "y w1 s"), ("b", ADD, "a k")], "q a k b"),
        ([("q", LINEAR, "x w0 s"), ("a", SILU, "w1"), ("k", LINEAR, "x a s"), ("v", LINEAR, "x w2 s")], "q a k v"),
        ([("q", LINEAR, "x w0 s"), ("c", COPY, "w1 w2"), ("k", LINEAR, "x w1 s"), ("a", ADD, "q k")], "q c k a"),
        ([("a", SILU, "x"), ("q", LINEAR, "a w0 s"), ("b", SILU, "q"), ("k", LINEAR, "a w1 s")], "a q k b"),
    ],
    ids=["of-one-input", "of-two-inputs", "weight-made-between", "weight-written-between", "input-made-before"],
)
def test_layers_of_one_input_become_neighbours(steps, wanted):
    graph = graph_of(*[(name, target, arguments.split()) for name, target, arguments in steps])
    group_by_input(graph)
    graph.lint()
    assert order(graph) == wanted.split()


class Attention(nn.Module):
    """What is between the layers of an attention: each result goes through something before the next is made."""

    def __init__(self, device="cpu"):
        super().__init__()
        for name in "qkvo":
            linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
            with torch.no_grad():
                linear.weight.copy_(wide(WIDTH, WIDTH, seed=ord(name)) / WIDTH**0.5)
            setattr(self, name, linear)
        quantize_model_(self, include=["*"])
        self.to(device)

    def forward(self, x):
        x = nn.functional.rms_norm(x, (WIDTH,))
        q = nn.functional.silu(self.q(x)) * 2
        k = nn.functional.gelu(self.k(x)) + q
        v = torch.tanh(self.v(x)) * k
        return self.o(q + v)


def test_results_are_the_same():
    model, x = Attention(), wide(3, WIDTH)
    with torch.no_grad():
        plain = torch.compile(model, fullgraph=True)(x)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, fullgraph=True, options=compile_options())(x), plain)
        assert (plain - model(x)).norm() < 0.05 * plain.norm()


@pytest.mark.models
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_launched_early_in_a_graph_with_other_inputs(rows, join):
    """Kernels that began before their inputs are written would read those of the replay before."""
    model = nn.Sequential(*[Attention("cuda") for _ in range(3)])
    x = wide(rows, WIDTH).cuda()
    fp8core.torch.warm_up(model, rows=[rows])
    with torch.no_grad():
        options = compile_options(model if join else None)
        compiled = torch.compile(model, fullgraph=True, dynamic=False, options=options)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compiled(x)
            compiled(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compiled(x)
        inputs = [wide(rows, WIDTH, seed=seed).cuda() for seed in range(40)]
        alone = []
        for one in inputs:
            x.copy_(one)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            alone.append(result.clone())
        for one, wanted in zip(inputs, alone, strict=True):
            assert (wanted - model(one)).norm() < len(model) * 0.05 * wanted.norm()
        found = []
        for one in inputs * 5:  # without waiting in between
            x.copy_(one)
            graph.replay()
            found.append(result.clone())
        assert all(torch.equal(one, wanted) for one, wanted in zip(found, alone * 5, strict=True))


@pytest.mark.models
def test_what_reduce_overhead_does_with_these_options():
    from torch._dynamo.utils import counters

    model = nn.Sequential(*[Attention("cuda") for _ in range(2)])
    with torch.inference_mode():
        options = {**compile_options(model), "triton.cudagraphs": True}
        compiled = torch.compile(model, fullgraph=True, options=options)
        counters.clear()
        for seed in range(6):
            x = wide(3, WIDTH, seed=seed).cuda()
            torch.compiler.cudagraph_mark_step_begin()
            wanted = model(x)
            assert (compiled(x) - wanted).norm() < len(model) * 0.05 * wanted.norm()
        assert not counters["inductor"]["cudagraph_skips"]
    assert len(ADJACENT) > 0


def uuid(join=False):
    return compiling._graph_pass(join).uuid()


@pytest.mark.parametrize("module", ["problem.py", "core/specs.py", "torch/schemas.py", "torch/joining.py"])
def test_what_inductor_keeps_is_keyed_by_every_module_that_it_depends_on(module, tmp_path, monkeypatch):
    """The alignment, the block size and the operators' arguments, all of which the pass reads."""
    own, joined = uuid(), uuid(join=True)
    assert own != joined
    copies = [
        shutil.copytree(compiling._PACKAGE, tmp_path / name, ignore=lambda *_: ["__pycache__"])
        for name in ("same", "changed")
    ]
    monkeypatch.setattr(compiling, "_PACKAGE", copies[0])
    assert uuid() == own, "the place of the package does not matter"
    with (copies[1] / module).open("a") as file:
        file.write("# changed\n")
    monkeypatch.setattr(compiling, "_PACKAGE", copies[1])
    assert uuid() != own


def test_without_sources_inductor_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_PACKAGE", tmp_path)
    assert uuid() is None
