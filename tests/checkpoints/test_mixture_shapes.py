"""Which experts of a checkpoint are compiled as grouped products."""

import re

import pytest

from fp8core.checkpoint.shapes.linear import LayerShape
from fp8core.checkpoint.shapes.mixtures import EACH, MixtureShape, mixtures_of

CONFIG = {"num_experts_per_tok": 2}
UP, DOWN = LayerShape(256, 512, "channel"), LayerShape(512, 256, "channel")


def layers(projections, experts=4, module="model.layers.0.mlp.experts", **others):
    """Return layers with the names of their weights: those of each expert, and others."""
    found = {}
    for projection, shape in projections.items():
        found.setdefault(shape, []).extend(f"{module}.{i}.{projection}.weight" for i in range(experts))
    for name, shape in others.items():
        found.setdefault(shape, []).append(name)
    return found


def of(scheme, n=256, bias=False):
    return {
        **dict.fromkeys(("gate_proj", "up_proj"), LayerShape(n, 512, scheme, bias)),
        "down_proj": LayerShape(512, n, scheme, bias),
    }


@pytest.mark.parametrize(
    ("projections", "config", "wanted"),
    [
        (of("channel"), CONFIG, MixtureShape(4, 2, 512, 256, "channel")),
        (of("tensor"), CONFIG, MixtureShape(4, 2, 512, 256, "channel")),
        (of("block"), {"text_config": CONFIG}, MixtureShape(4, 2, 512, 256, "block")),
        ({"w1": UP, "w3": UP, "w2": DOWN}, CONFIG, MixtureShape(4, 2, 512, 256, "channel")),
        ({"up_proj": UP, "down_proj": DOWN}, CONFIG, MixtureShape(4, 2, 512, 256, "channel", gated=False)),
        ({"up_proj": UP._replace(n=192, scheme="block"), "down_proj": DOWN._replace(k=192, scheme="block")}, CONFIG,
         MixtureShape(4, 2, 512, 192, "block", gated=False)),
        (of("block", 192), CONFIG, None),
        (of("channel", bias=True), CONFIG, None),
        (of("channel"), {"moe_topk": [2, 2]}, MixtureShape(4, 2, 512, 256, "channel")),
        (of("channel"), {"num_experts_per_tok": None, "moe_k": 2}, MixtureShape(4, 2, 512, 256, "channel")),
        ({"gate_proj": UP, "up_proj": UP}, CONFIG, None),
        ({"gate_proj": UP, "up_proj": UP._replace(n=128), "down_proj": DOWN}, CONFIG, None),
        ({"gate_proj": UP, "up_proj": UP, "down_proj": DOWN._replace(scheme="block")}, CONFIG, None),
        ({"gate_proj": UP, "up_proj": UP, "down_proj": DOWN._replace(k=128)}, CONFIG, None),
    ],
)  # fmt: skip
def test_a_mixture_of_alike_experts_is_found(projections, config, wanted):
    found = mixtures_of(layers(projections), config)
    assert found == ({} if wanted is None else {wanted: ["model.layers.0.mlp.experts"]})


@pytest.mark.parametrize("number", [None, 0, -1, True, 2.0, "2", [], [2, 3], {}], ids=repr)
def test_experts_of_an_unknown_number_are_left_out_and_named(number):
    got = "none" if number is None else re.escape(repr(number))
    words = rf"^config\.json needs one number .* as num_experts_per_tok, .*, got {got}: .* of model\.layers\.0\.mlp\.experts"
    with pytest.warns(RuntimeWarning, match=f"{words} are left out$"):
        assert mixtures_of(layers(of("channel")), {"num_experts_per_tok": number}) == {}


THREE = {"text_config": {"num_experts_per_tok": 3}}


@pytest.mark.parametrize(
    ("first", "second", "config"),
    [
        ("thinker.model", "talker.model", {"thinker_config": THREE, "talker_config": {"text_config": CONFIG}}),
        ("model.language_model", "model.vision_tower", {**THREE, "vision_config": CONFIG}),
        ("model", "vision_model", {**THREE, "vision_config": CONFIG}),
        ("model", "model.mtp", {"num_experts_per_tok": 3, "mtp_config": CONFIG}),
        ("thinker.model", "talker.model", {"thinker_config": THREE}),
    ],
)
def test_each_part_of_a_model_has_the_number_of_its_own_configuration(first, second, config, recwarn):
    modules = [f"{part}.layers.{i}.mlp.experts" for part in (first, second) for i in (0, 1)]
    every = {}
    for module in modules:
        for shape, names in layers(of("channel"), module=module).items():
            every.setdefault(shape, []).extend(names)
    made = MixtureShape(4, 3, 512, 256, "channel")
    found = mixtures_of(every, config)
    assert found.pop(made) == modules[:2]
    if len(config) > 1:
        assert found == {made._replace(each=2): modules[2:]}
        assert not recwarn
    else:
        assert not found
        assert str(recwarn.pop().message).endswith("of talker.model.layers.0.mlp.experts and 1 more are left out")


def test_the_number_of_a_token_s_experts_has_no_other_name_in_transformers():
    """Models of one expert a token, or of an unchangeable number, have none."""
    transformers = pytest.importorskip("transformers")
    unnamed = set()
    for model_type, kind in transformers.CONFIG_MAPPING.items():
        for part in {kind, *(kind.sub_configs or {}).values()}:
            fields = {name for base in part.__mro__ for name in vars(base).get("__annotations__", ())}
            counts = any(re.fullmatch(r"(moe_)?(num|n)_(local_|routed_)?experts", name) for name in fields)
            if counts and fields.isdisjoint(EACH):
                unnamed.add(model_type)
    assert unnamed == {"nllb-moe", "switch_transformers", "vitpose_backbone"}


def test_experts_that_differ_are_left_out():
    odd = {"model.layers.0.mlp.experts.4.gate_proj.weight": UP._replace(n=128)}
    assert mixtures_of(layers(of("channel"), **odd), CONFIG) == {}
    assert mixtures_of(layers(of("channel"), experts=1025), CONFIG) == {}


def test_layers_beside_experts_belong_to_no_mixture():
    others = {
        "model.layers.0.mlp.shared_experts.gate_proj.weight": UP,
        "model.layers.0.mlp.experts.gate_up_proj": UP,
        "model.layers.0.self_attn.o_proj.weight": DOWN,
    }
    assert list(mixtures_of(layers(of("channel"), **others), CONFIG)) == [MixtureShape(4, 2, 512, 256, "channel")]
