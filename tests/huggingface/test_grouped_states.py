"""The states of grouped experts: those of the loop over the same layers."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fp8core.transformers import Experts  # noqa: E402 - after the skips
from fp8core.transformers.stacks import Part  # noqa: E402
from huggingface.cases import same  # noqa: E402
from huggingface.test_experts import routed  # noqa: E402
from huggingface.test_grouped_experts import CASES, HIDDEN, grouped, loop  # noqa: E402


@pytest.mark.parametrize(("kind", "layout", "scheme", "static"), CASES)
def test_states_have_the_names_and_values_of_the_loop(kind, layout, scheme, static):
    theirs = loop(kind, layout, scheme, static)
    ours, wanted = grouped(theirs), theirs.state_dict()
    found = ours.state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not same(found[name], value)] == []
    places = {value.untyped_storage().data_ptr() for value in found.values()}
    assert len(places) == len(found), "no two share memory, which safetensors would refuse"
    separate = ours.separate()
    assert type(separate) is Experts
    assert [name for name, value in wanted.items() if not same(separate.state_dict()[name], value)] == []
    assert separate[2].get_submodule(layout.down).weight.data_ptr() == ours.down.weight[2].data_ptr()

    other = grouped(theirs)
    for parameter in other.parameters():
        parameter.data.view(torch.uint8).zero_()
    for assign in (False, True):
        other.load_state_dict(wanted, assign=assign)
        assert [name for name, value in wanted.items() if not same(other.state_dict()[name], value)] == []
    x, index, weights = routed(6, hidden=HIDDEN)
    with torch.no_grad():
        assert torch.equal(other(x, index, weights), ours(x, index, weights))
        assert torch.equal(copy.deepcopy(ours)(x, index, weights), ours(x, index, weights))


def test_states_that_do_not_fit():
    ours = grouped(loop())
    state = ours.state_dict()
    lost = {name: value for name, value in state.items() if name != "1.up_proj.weight"}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"1\.up_proj\.weight\""):
        ours.load_state_dict(lost)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"9\.up_proj\.weight\""):
        ours.load_state_dict({**state, "9.up_proj.weight": state["1.up_proj.weight"]})
    wide = state["1.up_proj.weight"].float()
    with pytest.raises(
        RuntimeError, match=r"1\.up_proj\.weight needs torch\.float8_e4m3fn\[256, 128\], got torch\.float32"
    ):
        ours.load_state_dict({**state, "1.up_proj.weight": wide})
    for scale, got in (
        (torch.ones(128, 1, dtype=torch.int64), r"torch\.int64\[128, 1\]"),
        (torch.ones(1, 1), r"torch\.float32\[1, 1\]"),
    ):
        said = rf"0\.down_proj\.weight_scale needs torch\.float32\[128, 1\], got {got}"
        with pytest.raises(RuntimeError, match=said):
            ours.load_state_dict({**state, "0.down_proj.weight_scale": scale})
    assert [name for name, value in state.items() if not same(ours.state_dict()[name], value)] == []


def test_a_weight_without_its_scale_is_loaded_with_a_warning():
    ours = grouped(loop())
    state = {name: value for name, value in ours.state_dict().items() if name != "1.up_proj.weight_scale"}
    with pytest.warns(RuntimeWarning, match=r"1\.up_proj\.weight was loaded without 1\.up_proj\.weight_scale: wrong"):
        ours.load_state_dict(state, strict=False)


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
def test_scales_of_16_bits_are_loaded_as_their_numbers(scheme):
    ours = grouped(loop(scheme=scheme))
    name = "1.down_proj.weight_scale"
    narrow = ours.state_dict()[name].bfloat16() * 3
    ours.load_state_dict({**ours.state_dict(), name: narrow})
    assert torch.equal(ours.state_dict()[name], narrow.float())


def test_a_projection_has_the_scales_of_the_block_that_it_ends_in():
    part = Part(1, "down_proj", "down_proj", 0, 160, "block")
    assert part.of("weight_scale", torch.arange(6.0).view(3, 2, 1)).tolist() == [[2], [3]]


def test_tensors_that_no_computation_uses_are_loaded_and_saved():
    theirs = loop()
    for expert in theirs:
        expert.down_proj.register_buffer("input_scale_ub", torch.tensor([1200.0]))
    ours, other = grouped(theirs), grouped(theirs)
    name = "1.down_proj.input_scale_ub"
    state = {**ours.state_dict(), name: torch.tensor([7.0])}
    ours.load_state_dict(state)
    state[name].fill_(8)
    assert (ours.state_dict()[name], other.state_dict()[name]) == (7, 1200)
    del state[name]
    assert ours.load_state_dict(state, strict=False).missing_keys == [name]


def test_gate_and_up_are_not_loaded_with_different_static_scales():
    ours = grouped(loop(static=True))
    state = ours.state_dict()
    said = r"1\.gate_proj\.input_scale needs 0\.5, which gate_up_proj has in common, got 0\.03"
    with pytest.raises(RuntimeError, match=said):
        ours.load_state_dict({**state, "1.up_proj.input_scale": torch.tensor([0.5])})
    both = dict.fromkeys(("1.gate_proj.input_scale", "1.up_proj.input_scale"), torch.tensor(0.5))
    ours.load_state_dict({**state, **both})
    assert float(ours.first.input_scale[1]) == 0.5


def test_a_state_is_assigned_to_experts_without_memory():
    theirs = loop()
    ours, wanted = grouped(theirs), theirs.state_dict()
    meta = copy.deepcopy(ours).to("meta")
    meta.load_state_dict(wanted, assign=True)
    assert [name for name, value in wanted.items() if not same(meta.state_dict()[name], value)] == []
    meta = copy.deepcopy(ours).to("meta")
    told = meta.load_state_dict({name: x for name, x in wanted.items() if name != "1.up_proj.weight"}, False, True)
    assert told.missing_keys == ["1.up_proj.weight"]
    assert not meta.state_dict()["1.up_proj.weight"].float().any()
