"""The loop over experts against transformers' own, with the same weights in float32."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402 - after the skips

from fp8core.transformers import Experts  # noqa: E402
from fp8core.transformers.experts import Layout, fits  # noqa: E402
from huggingface.cases import random_model  # noqa: E402

COUNT, HIDDEN, INNER = 5, 24, 16


class Theirs(nn.Module):
    """Stacked experts, gated by a function of their own or not at all: multiplied one token at a time."""

    def __init__(self, gated):
        super().__init__()
        torch.manual_seed(2)
        first = "gate_up_proj" if gated else "up_proj"
        self.register_parameter(first, nn.Parameter(torch.randn(COUNT, INNER * (1 + gated), HIDDEN)))
        self.down_proj = nn.Parameter(torch.randn(COUNT, HIDDEN, INNER))
        self.act_fn = nn.SiLU()
        self.limit = 0.7

    def forward(self, x, index, weights):
        result = torch.zeros_like(x)
        for token in range(len(x)):
            for at, expert in enumerate(index[token].tolist()):
                if expert >= COUNT:
                    continue
                inner = (self.gate_up_proj if hasattr(self, "gate_up_proj") else self.up_proj)[expert] @ x[token]
                inner = self._apply_gate(inner) if hasattr(self, "gate_up_proj") else self.act_fn(inner)
                result[token] += weights[token, at] * (self.down_proj[expert] @ inner)
        return result


class Gated(Theirs):
    def __init__(self):
        super().__init__(True)

    def _apply_gate(self, both):
        gate, up = both.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=self.limit) * (up + 1)


class Sole(Gated):
    """Without an activation beside the gate, as the experts of MiniMax-M3."""

    def __init__(self):
        super().__init__()
        del self.act_fn

    def _apply_gate(self, both):
        gate, up = both.chunk(2, dim=-1)
        return gate * torch.sigmoid(gate.clamp(max=self.limit)) * up


class Plain(Theirs):
    def __init__(self):
        super().__init__(False)


def apart(theirs, layout):
    """Make `Experts` of a module, which goes on as it is, with the same values."""
    made = Experts(copy.deepcopy(theirs), layout).to_empty(device="cpu")
    stacked = dict(theirs.named_parameters())
    first = stacked.get("gate_up_proj", stacked.get("up_proj"))
    with torch.no_grad():
        for at, expert in enumerate(made):
            for name, values in zip(layout.first, first[at].chunk(len(layout.first)), strict=True):
                getattr(expert, name).weight.copy_(values)
            getattr(expert, layout.down).weight.copy_(stacked["down_proj"][at])
    return made


def routed(tokens, each=2, seed=0, most=COUNT, hidden=HIDDEN):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator)
    index = torch.rand(tokens, most, generator=generator).argsort(-1)[:, :each]
    return x, index, torch.rand(tokens, each, generator=generator)


@pytest.mark.parametrize("tokens", [0, 1, 2, 17])
@pytest.mark.parametrize("most", [2, COUNT, COUNT + 3], ids=["few", "all", "some-of-nobody"])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (Gated, Layout(("gate_proj", "up_proj"), "down_proj", ())),
        (Sole, Layout(("gate_proj", "up_proj"), "down_proj", ())),
        (Plain, Layout(("w1",), "w2", ())),
    ],
    ids=["own-gate", "only-gate", "no-gate"],
)
def test_the_sum_over_experts(kind, layout, most, tokens):
    theirs = kind()
    assert fits(theirs, layout)
    ours = apart(theirs, layout)
    x, index, weights = routed(tokens, most=most)
    torch.testing.assert_close(ours(x, index, weights), theirs(x, index, weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("nobody", [-1, -7, COUNT, COUNT + 3])
def test_indices_of_nobody_are_left_out(nobody, dtype):
    layout = Layout(("gate_proj", "up_proj"), "down_proj", ())
    ours = apart(Gated(), layout)
    x, index, weights = routed(9, each=3)
    index[::2, 1] = nobody
    found = ours(x, index.to(dtype), weights)
    kept = torch.where(index == nobody, 0.0, weights)
    wanted = ours(x, torch.where(index == nobody, 0, index), kept)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_transformers_own_module_and_gradients():
    block = random_model("qwen3_moe").float().model.layers[0].mlp
    theirs = block.experts
    ours = apart(theirs, Layout(("gate_proj", "up_proj"), "down_proj", ()))
    found, wanted = [], []
    for module, results in ((ours, found), (theirs, wanted)):
        x, index, weights = routed(9, most=4, hidden=128)
        x.requires_grad_(True)
        weights.requires_grad_(True)
        y = module(x, index, weights)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        results += [y.detach(), x.grad, weights.grad]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert ours.num_experts == theirs.num_experts == 4


def test_the_stacked_weights_do_not_stay_in_memory():
    theirs = Gated()
    assert Experts(theirs, Layout(("gate_proj", "up_proj"), "down_proj", ())).num_experts == COUNT
    assert not list(theirs.parameters())


def test_a_copy_stands_alone():
    ours = apart(Gated(), Layout(("gate_proj", "up_proj"), "down_proj", ()))
    other = copy.deepcopy(ours)
    x, index, weights = routed(6)
    with torch.no_grad():
        wanted = ours(x, index, weights)
        ours[0].up_proj.weight.zero_()
        assert torch.equal(other(x, index, weights), wanted)
