"""Grouped experts against the loop over the same layers: results, gradients, dtypes and compiling."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402 - after the skips

import fp8core  # noqa: E402
from fp8core.errors import LayoutError  # noqa: E402
from fp8core.torch import Linear  # noqa: E402
from fp8core.transformers import GroupedExperts, group_experts_  # noqa: E402
from fp8core.transformers.experts import Layout  # noqa: E402
from huggingface.cases import TOKENS, distance, fp8_layers, logits, random_model  # noqa: E402
from huggingface.test_experts import COUNT, Gated, Plain, apart, routed  # noqa: E402

GATED, PLAIN = Layout(("gate_proj", "up_proj"), "down_proj", ()), Layout(("w1",), "w2", ())
HIDDEN, INNER = 128, 256


class Usual(Gated):
    """Gated as transformers' experts are without a function of their own."""

    _apply_gate = None


class WithGelu(Usual):
    """Gated by another activation than the one that a kernel of fp8core has."""

    def __init__(self):
        super().__init__()
        self.act_fn = nn.GELU(approximate="tanh")


def loop(kind=Usual, layout=GATED, scheme="channel", static=False, inner=INNER, **options):
    """Experts with a layer for each projection, of random weights."""
    torch.manual_seed(3)
    original = kind()
    first = "gate_up_proj" if len(layout.first) == 2 else "up_proj"
    setattr(original, first, nn.Parameter(torch.randn(COUNT, inner * len(layout.first), HIDDEN) / 8))
    original.down_proj = nn.Parameter(torch.randn(COUNT, HIDDEN, inner) / 12)
    made = apart(original, layout)
    for at, expert in enumerate(made):
        for name, linear in list(expert.named_children()):
            scale = (0.02 if name == layout.down else 0.03) * (1 + at / 8) if static else None
            setattr(expert, name, Linear.from_linear(linear, scheme=scheme, input_scale=scale, **options))
    return made


def grouped(experts):
    """The same experts, grouped; the loop goes on as it is."""
    holder = nn.ModuleDict({"experts": copy.deepcopy(experts)})
    assert group_experts_(holder) == ("experts",)
    assert group_experts_(holder) == ()
    made = holder["experts"]
    assert type(made) is GroupedExperts
    return made


CASES = [
    (Usual, GATED, "channel", False),
    (Usual, GATED, "channel", True),
    (Usual, GATED, "tensor", True),
    (Usual, GATED, "block", False),
    (Gated, GATED, "block", False),
    (WithGelu, GATED, "channel", False),
    (Plain, PLAIN, "channel", False),
    (Plain, PLAIN, "tensor", True),
    (Plain, PLAIN, "block", False),
]


@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("most", [2, COUNT, COUNT + 3], ids=["few", "all", "some-of-nobody"])
@pytest.mark.parametrize(("kind", "layout", "scheme", "static"), CASES)
def test_the_results_of_the_loop(kind, layout, scheme, static, most, tokens):
    theirs = loop(kind, layout, scheme, static)
    ours = grouped(theirs)
    x, index, weights = routed(tokens, most=most, hidden=HIDDEN)
    with torch.no_grad():
        found, wanted = ours(x, index, weights), theirs(x, index, weights)
    assert found.dtype == x.dtype
    # A code may round the other way where sums differ in their last bits.
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3 * float(wanted.abs().max()) if tokens else 0)


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_gradients_or_the_kind_of_gate(dtype, own):
    """Nor on the dtype that the layers expect (own), if inputs have another."""
    theirs = loop(scheme="block").to(own)
    ours = grouped(theirs)
    x, index, weights = routed(9, hidden=HIDDEN)
    x = x.to(dtype)
    with torch.no_grad():
        found = ours(x, index, weights)
        assert found.dtype == dtype
        assert torch.equal(found, theirs(x, index, weights))
    assert torch.equal(found, ours(x.requires_grad_(), index, weights).detach())


@pytest.mark.parametrize(("kind", "layout", "scheme", "static"), CASES)
def test_gradients_are_those_of_the_loop(kind, layout, scheme, static):
    theirs = loop(kind, layout, scheme, static)
    results = []
    for module in (grouped(theirs), theirs):
        x, index, weights = routed(9, most=COUNT + 1, hidden=HIDDEN)
        x.requires_grad_(True)
        weights.requires_grad_(True)
        y = module(x, index, weights)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        results.append((x.grad, weights.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3 * float(other.abs().max()))


def test_gradients_reach_the_parameters_of_an_activation():
    grads = []
    for experts in (start := loop(), grouped(start)):
        activation = experts._original[0].act_fn = nn.PReLU(init=0.1)
        experts(*routed(9, hidden=HIDDEN)).sum().backward()
        grads.append(activation.weight.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0.05, atol=0.05)


def test_parameters_are_not_looked_at_without_derivatives(monkeypatch):
    ours = grouped(loop())
    monkeypatch.setattr(ours._original[0], "parameters", None)
    with torch.no_grad():
        assert ours(*routed(9, hidden=HIDDEN)).shape == (9, HIDDEN)


@pytest.mark.parametrize("scheme", ["channel", "block"])
@pytest.mark.parametrize("graded", [False, True], ids=["plain", "graded"])
def test_choices_of_no_expert_are_left_out(graded, scheme):
    """Whatever their weights are, and whatever the first and the last expert would give."""
    ours = grouped(loop(scheme=scheme))
    x, index, weights = routed(7, each=3, most=COUNT - 2, hidden=HIDDEN)
    index += 1  # neither the first expert nor the last
    others = torch.tensor([COUNT, -1, 2**40, -COUNT, COUNT + 1, -(2**63), 2**63 - 1])
    wanted = ours(x, index[:, :2].contiguous(), weights[:, :2].contiguous()).detach()
    index[:, 2], weights[:, 2] = others, torch.tensor([float("nan"), float("inf"), 1, 1, 1, 1, 1])
    for stack in (ours.first, ours.down):
        for expert in (0, COUNT - 1):
            stack.weight_scale.data[expert] = float("nan")
    x.requires_grad_(graded), weights.requires_grad_(graded)
    found = ours(x, index, weights)
    torch.testing.assert_close(found.detach(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    assert found.requires_grad == graded
    if graded:
        found.sum().backward()
        assert x.grad.isfinite().all()
        assert weights.grad[:, :2].isfinite().all()
        assert not weights.grad[:, 2].any()


@pytest.mark.parametrize("which", ["x", "weights"])
def test_gradients_of_one_alone(which):
    theirs = loop()
    results = []
    for module in (grouped(theirs), theirs):
        x, index, weights = routed(9, hidden=HIDDEN)
        given = {"x": x, "weights": weights}[which].requires_grad_()
        y = module(x, index, weights)
        y.square().sum().backward()
        results.append(given.grad)
    torch.testing.assert_close(*results, rtol=0, atol=2e-3 * float(results[1].abs().max()))


@pytest.mark.parametrize("graded", [False, True], ids=["plain", "graded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_choices_and_weights_of_other_layouts_and_dtypes(dtype, graded):
    ours = grouped(loop(scheme="block").to(dtype))
    x, index, weights = routed(9, each=3, hidden=HIDDEN)
    x, weights = x.to(dtype).requires_grad_(graded), weights.to(dtype)
    wanted = ours(x, index, weights)
    assert wanted.dtype == dtype
    for choices in (
        index.int(),
        index.T.contiguous().T,
        index.repeat(1, 2)[:, :3],
        index.repeat_interleave(2, 1)[:, ::2],
    ):
        for shares in (weights, weights.T.contiguous().T, weights.repeat(1, 2)[:, 3:]):
            assert torch.equal(ours(x, choices, shares), wanted)
    turned = x.detach().T.contiguous().T.requires_grad_(graded)
    assert torch.equal(ours(turned, index, weights), wanted)


def by_rows(ours, x, index, weights, fused):
    """The same of wide rows, which the layers cast and quantize, but for those that an activation quantizes."""
    rows, offs, inverse = fp8core.moe_permute(x, index.contiguous(), COUNT)
    both = ours.first(rows, offs)
    if fused:  # what torch computes in float32 differs in its last bits
        inner = fp8core.silu_and_mul_quant(both, round_intermediate=True, **ours.down.quantization(len(both), offs))
    else:
        inner = ours._activated(both)
    return fp8core.moe_unpermute(ours.down(inner, offs, both.dtype), inverse, weights, out_dtype=x.dtype)


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize(("kind", "layout", "scheme", "static"), CASES)
def test_tokens_are_cast_and_quantized_before_they_become_rows(
    kind, layout, scheme, static, dtype, autocast, monkeypatch
):
    """With the bits of rows that are cast and quantized one by one."""
    ours, given = grouped(loop(kind, layout, scheme, static).half()), []
    x, index, weights = routed(9, most=COUNT + 1, hidden=HIDDEN)
    x = x.to(dtype)

    def recorded(x, *rest):
        given.append(x)
        return fp8core.moe_permute(x, *rest)

    monkeypatch.setattr("fp8core.transformers.grouped.moe_permute", recorded)
    with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
        wanted = by_rows(ours, x, index, weights, fused=kind is Usual)
        assert torch.equal(ours(x, index, weights), wanted)
    assert given[0].dtype == (autocast or dtype) if static else isinstance(given[0], fp8core.Quantized)


@pytest.mark.parametrize("dynamic", [(), GATED.first, (GATED.down,), (*GATED.first, GATED.down)], ids=str)
@pytest.mark.parametrize("kind", [Usual, Gated])
def test_groups_of_rows_are_computed_once(kind, dynamic, monkeypatch):
    """For gate, up and down, if any of them has static scales."""
    experts, calls = loop(kind, static=True), []
    for expert in experts:
        for name in dynamic:
            getattr(expert, name).input_scale = None
    ours, given = grouped(experts), routed(9, most=COUNT + 1, hidden=HIDDEN)
    with torch.no_grad():
        wanted = by_rows(ours, *given, fused=kind is Usual)
        search = torch.searchsorted
        monkeypatch.setattr(torch, "searchsorted", lambda *args, **options: calls.append(0) or search(*args, **options))
        assert torch.equal(ours(*given), wanted)
    assert len(calls) == (len(dynamic) < 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_inputs_and_keeps_the_dtype_of_results(dtype):
    """As the loop's layers do: inputs are cast, and the result has the dtype of the input."""
    theirs = loop(scheme="block")
    ours = grouped(theirs)
    x, index, weights = routed(9, hidden=HIDDEN)
    results = []
    for module in (ours, theirs):
        for graded in (False, True):
            with torch.autocast("cpu", torch.bfloat16):
                y = module(x.to(dtype).requires_grad_(graded), index, weights)
            assert y.dtype == dtype
            results.append(y.detach())
    for found in results[:-1]:
        torch.testing.assert_close(found, results[-1], rtol=0, atol=0.02 * float(results[-1].abs().max()))


@pytest.mark.parametrize("graded", [False, True], ids=["plain", "graded"])
def test_one_graph_for_any_number_of_tokens(graded):
    torch._dynamo.reset()
    ours = grouped(loop())
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5, 16, 33):
        x, index, weights = routed(tokens, most=COUNT + 1, hidden=HIDDEN)
        weights.requires_grad_(graded), x.requires_grad_(graded)
        with torch._dynamo.config.patch(error_on_recompile=tokens > 3):
            found, wanted = compiled(x, index, weights), ours(x, index, weights)
        assert found.requires_grad == graded
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3 * float(wanted.detach().abs().max()))
        if graded:
            grads = [torch.autograd.grad(y.square().sum(), (x, weights)) for y in (found, wanted)]
            for one, other in zip(*grads, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=4e-3 * float(other.abs().max()))


def test_a_tangent_of_the_weights_passes():
    """The result is linear in them."""
    x, index, weights = routed(9, hidden=HIDDEN)
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(weights, 2 * weights)
        y, tangent = torch.autograd.forward_ad.unpack_dual(grouped(loop())(x, index, dual))
    torch.testing.assert_close(tangent, 2 * y)


def test_a_tangent_is_refused_not_lost():
    x, index, weights = routed(9, hidden=HIDDEN)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(LayoutError, match="input needs to be without a tangent of forward-mode derivatives"):
            grouped(loop())(dual, index, weights)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_whole_mixture_is_compiled_without_a_graph_break(kind, tmp_path):
    from fp8core.transformers import from_pretrained

    random_model(kind).save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    assert any(isinstance(module, GroupedExperts) for module in model.modules())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(TOKENS, use_cache=False).logits.float()
    assert distance(found, logits(model)) < 0.01
    count = len(fp8_layers(model))
    assert len(model.dequantize().state_dict()) > count
    assert not fp8_layers(model)
