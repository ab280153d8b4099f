"""Which experts are grouped, and what stays on the modules that are: hooks, offloaded weights, memory."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402 - after the skips

from fp8core.errors import DeviceError, LayoutError  # noqa: E402
from fp8core.torch import Linear  # noqa: E402
from fp8core.transformers import Experts, GroupedExperts, group_experts_, grouping, split_experts_, stacks  # noqa: E402
from fp8core.transformers import grouped as grouped_experts  # noqa: E402
from fp8core.transformers.grouping import separate_experts_  # noqa: E402
from huggingface.cases import logits, random_model  # noqa: E402
from huggingface.test_experts import Plain, routed  # noqa: E402
from huggingface.test_grouped_experts import GATED, HIDDEN, INNER, PLAIN, grouped, loop  # noqa: E402


def other_gate_scale(experts):
    experts[1].gate_proj.input_scale.data *= 2


def one_dynamic(experts):
    experts[1].down_proj.input_scale = None


def one_invariant(experts):
    experts[1].down_proj.batch_invariant = True


def one_accurate(experts):
    experts[1].down_proj.use_fast_accum = False


def one_biased(experts):
    experts[1].down_proj.bias = nn.Parameter(torch.ones(HIDDEN), requires_grad=False)


def other_dtype(experts):
    for expert in experts:
        expert.down_proj.compute_dtype = torch.float16


def one_wide(experts):
    experts[0].up_proj = nn.Linear(HIDDEN, INNER, bias=False)


def one_hooked(experts):
    experts[0].up_proj.register_forward_hook(lambda *_: None)


def parametrized(experts):
    nn.utils.parametrize.register_parametrization(experts[0].up_proj, "weight_scale", nn.Identity())


def other_scheme(experts):
    for expert in experts:
        expert.down_proj = Linear.from_linear(expert.down_proj.to_linear(), scheme="channel", input_scale=0.02)


def one_expert_hooked(experts):
    experts[0].register_forward_hook(lambda *_: None)


def one_patched(experts):
    own = experts[1].down_proj
    own.forward = lambda x: 2 * type(own).forward(own, x)


def all_patched(experts):
    experts.forward = lambda *args: 2 * Experts.forward(experts, *args)


def all_hooked(experts):
    experts.register_forward_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    "change",
    [
        other_gate_scale,
        one_dynamic,
        one_invariant,
        one_accurate,
        one_biased,
        other_dtype,
        one_wide,
        one_hooked,
        one_expert_hooked,
        all_hooked,
        one_patched,
        all_patched,
        other_scheme,
        parametrized,
    ],
)
def test_experts_that_are_not_alike_stay_apart(change):
    holder = nn.ModuleDict({"experts": loop(scheme="tensor", static=True)})
    change(holder["experts"])
    x, index, weights = routed(6, hidden=HIDDEN)
    with torch.no_grad():
        wanted = holder["experts"](x, index, weights)
        assert group_experts_(holder) == ()
        assert type(holder["experts"]) is Experts
        assert torch.equal(holder["experts"](x, index, weights), wanted)


def two_mixtures():
    return nn.ModuleDict({"one": grouped(loop()), "other": grouped(loop())})


@pytest.mark.parametrize("change", [split_experts_, separate_experts_])
def test_hooks_and_offloaded_weights_are_refused_before_anything_is_replaced(change):
    accelerate = pytest.importorskip("accelerate")
    hooked, offloaded, whole, patched = (two_mixtures() for _ in range(4))
    hooked["other"].down.register_forward_hook(lambda *_: None)
    whole["other"].register_forward_hook(lambda *_: None)
    patched["other"].forward = lambda *_: None
    accelerate.cpu_offload(offloaded["other"].down, execution_device="cpu")
    for model, error, match in (
        (hooked, LayoutError, r"model needs layers without hooks, got some on other\.down_proj"),
        (whole, LayoutError, "model needs layers without hooks, got some on other: remove"),
        (patched, LayoutError, "model needs layers with the forward of their class, got another on other"),
        (offloaded, DeviceError, r"model needs its weights in memory, got other\.down_proj offloaded"),
    ):
        before = list(model.modules())
        with pytest.raises(error, match=match):
            change(model)
        assert list(model.modules()) == before


def test_what_is_stacked_and_separated_keeps_the_hook_that_brings_its_inputs():
    hooks = pytest.importorskip("accelerate.hooks")
    model, hook = nn.ModuleDict({"one": loop()}), hooks.ModelHook()
    hooks.add_hook_to_module(model["one"], hook)
    for change, made in ((group_experts_, GroupedExperts), (separate_experts_, Experts)):
        assert change(model) == ("one",)
        assert type(model["one"]) is made
        assert model["one"]._hf_hook is hook


def test_a_mixture_that_is_split_is_offloaded(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    from fp8core.transformers import Fp8CoreConfig, from_pretrained

    random_model("qwen3_moe").save_pretrained(tmp_path)
    model = from_pretrained(tmp_path, quantization_config=Fp8CoreConfig(scheme="channel"))
    assert split_experts_(model)
    wanted = logits(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(logits(model), wanted)


def test_experts_in_two_places_stay_the_same():
    experts = loop()
    holder = nn.ModuleDict({"one": experts, "other": experts})
    assert group_experts_(holder) == ("one",)
    assert type(holder["one"]) is GroupedExperts
    assert holder["other"] is holder["one"]


def test_blocks_that_would_cross_gate_and_up():
    assert group_experts_(nn.ModuleDict({"experts": loop(scheme="block", inner=160)})) == ()
    assert group_experts_(nn.ModuleDict({"experts": loop(Plain, PLAIN, scheme="block", inner=160)})) == ("experts",)


def test_weights_that_follow_each_other_are_not_copied():
    experts = loop()
    stacked = torch.cat([getattr(expert, name).weight.view(torch.uint8) for expert in experts for name in GATED.first])
    for at, expert in enumerate(experts):
        for part, name in enumerate(GATED.first):
            begin = (2 * at + part) * INNER
            getattr(expert, name).weight = nn.Parameter(
                stacked[begin : begin + INNER].view(torch.float8_e4m3fn), requires_grad=False
            )
    holder = nn.ModuleDict({"experts": experts})
    assert group_experts_(holder) == ("experts",)
    assert holder["experts"].first.weight.data_ptr() == stacked.data_ptr()


@pytest.mark.parametrize(("change", "made"), [(group_experts_, loop), (split_experts_, lambda: grouped(loop()))])
def test_experts_alone_are_refused_and_stay_as_they_are(change, made):
    experts = made()
    before = experts.state_dict()
    with pytest.raises(LayoutError, match=rf"model needs to hold what is replaced .* {type(experts).__name__} alone"):
        change(experts)
    assert experts.state_dict().keys() == before.keys()


@pytest.mark.parametrize(("scheme", "static"), [("channel", True), ("tensor", False), ("block", False)])
@pytest.mark.parametrize("failing", [1, 2])
def test_experts_are_as_before_if_there_is_no_memory_to_stack_them(scheme, static, failing, monkeypatch):
    holder = nn.ModuleDict({"experts": loop(scheme=scheme, static=static)})
    x, index, weights = routed(6, hidden=HIDDEN)
    with torch.no_grad():
        wanted = holder["experts"](x, index, weights)
    calls = []

    def stacked(layers):
        calls.append(layers)
        if len(calls) == failing:
            raise torch.OutOfMemoryError
        return stacks.stacked(layers)

    monkeypatch.setattr(grouped_experts, "stacked", stacked)
    with pytest.raises(torch.OutOfMemoryError):
        group_experts_(holder)
    monkeypatch.undo()
    assert type(holder["experts"]) is Experts
    with torch.no_grad():
        assert torch.equal(holder["experts"](x, index, weights), wanted)
    assert group_experts_(holder) == ("experts",)
    with torch.no_grad():
        again = grouped(loop(scheme=scheme, static=static))
        assert torch.equal(holder["experts"](x, index, weights), again(x, index, weights))


def test_more_experts_than_a_grouped_product_takes_stay_apart(monkeypatch):
    experts = loop()
    assert grouping.can_be_grouped(experts)
    monkeypatch.setattr(grouping, "MOST_GROUPS", len(experts) - 1)
    assert not grouping.can_be_grouped(experts)
