"""Layers that readers join, and those whose columns blocks do not divide: FP8 together, or not at all."""

import pytest

from fp8core.checkpoint import (
    convert_checkpoint,
    inspect_checkpoint,
    open_checkpoint,
    plan_checkpoint,
    quantize_checkpoint,
)
from fp8core.checkpoint.formats.selection import matches, only
from fp8core.checkpoint.reading.faults import header_faults
from fp8core.errors import CheckpointError
from support.checkpoints import left_in, read
from support.planned import EXPERTS, MLP, QKV, L, folder, reasons, statuses


@pytest.mark.parametrize(
    ("exclude", "refused"),
    [
        ("*q_proj", "k_proj"),
        ("*self_attn.v_proj", "q_proj"),
        (f"{L}mlp.up_proj", "gate_proj"),
        ("*.experts.1.down_proj", "gate_proj"),
        ("*.experts.0.*", "gate_proj"),
    ],
)
def test_layers_that_vllm_joins_are_quantized_all_or_none(tmp_path, exclude, refused):
    source = folder(tmp_path / "in", {f"{name}.weight": (64, 64) for name in (*QKV, *MLP, *EXPERTS)})
    with pytest.raises(CheckpointError, match=rf"{refused}\.weight: vLLM joins .* is excluded by"):
        quantize_checkpoint(source, tmp_path / "out", exclude=[exclude])
    plan = plan_checkpoint(source, exclude=[exclude])
    assert {verdict.status for verdict in plan.verdicts} == {"quantized", "kept", "refused"}
    assert left_in(tmp_path) == ["in"]


@pytest.mark.parametrize(
    "exclude", [["*self_attn.*"], ["*mlp.gate_proj", "*mlp.up_proj"], ["*.mlp.down_proj"], ["*.experts.*"]]
)
def test_all_parts_or_a_layer_of_its_own_may_be_left_out(tmp_path, exclude):
    source = folder(tmp_path / "in", {f"{name}.weight": (64, 64) for name in (*QKV, *MLP, *EXPERTS)})
    assert set(statuses(source, exclude=exclude).values()) == {"quantized", "kept"}


@pytest.mark.parametrize(
    ("scheme", "status", "said"),
    [
        ("channel", "quantized", "linear layer"),
        ("block", "quantized", "linear layer"),
        ("tensor", "kept", "transformers splits it into 3 layers, but not its only scale"),
    ],
)
def test_a_layer_that_transformers_splits_needs_scales_that_it_can_split(tmp_path, scheme, status, said):
    shapes = {"encoder.layers.0.attn.Wqkv.weight": (384, 128), "encoder.layers.0.mlp.fc2.weight": (128, 256)}
    source = folder(tmp_path / "in", shapes, model_type="nomic_bert")
    kinds = {"encoder.layers.0.attn.Wqkv": status, "encoder.layers.0.mlp.fc2": "quantized"}
    assert statuses(source, scheme=scheme) == kinds
    assert any(reason.startswith(said) for reason in reasons(source, scheme=scheme).values())


@pytest.mark.parametrize(
    ("shapes", "kept"),
    [
        ({QKV[0]: (128, 576)}, {QKV[0]}),
        ({QKV[0]: (64, 128), QKV[1]: (128, 128), QKV[2]: (128, 128)}, set(QKV)),  # q is not whole blocks of rows
        ({QKV[0]: (128, 128), QKV[1]: (128, 128), QKV[2]: (64, 128)}, set()),  # the last one need not be
        ({MLP[0]: (128, 128), MLP[1]: (128, 200)}, set(MLP[:2])),
        ({MLP[2]: (200, 128)}, set()),
    ],
)
def test_a_block_scheme_keeps_what_readers_have_no_blocks_for(tmp_path, shapes, kept):
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()}
    source = folder(tmp_path / "in", {f"{L}self_attn.o_proj.weight": (128, 256), **shapes})
    found = statuses(source, scheme="block")
    assert {module for module, status in found.items() if status == "kept"} == kept
    assert all("multiples of 128" in reasons(source, scheme="block")[module] for module in kept)
    assert set(statuses(source, scheme="channel").values()) == {"quantized"}


def test_nothing_but_columns_that_blocks_do_not_divide_is_refused(tmp_path):
    source = folder(tmp_path / "in", {f"{name}.weight": (576, 576) for name in QKV})
    with pytest.raises(
        CheckpointError, match="no weight to quantize: scheme block needs k in multiples of 128, got 576"
    ):
        quantize_checkpoint(source, tmp_path / "out", scheme="block")


def test_a_layer_that_stays_is_listed_by_its_name_even_if_that_reads_like_a_pattern(tmp_path):
    names = [f"{L}mlp.{experts}.down_proj" for experts in ("experts[0]", "experts0")]
    source = folder(tmp_path / "in", {f"{name}.weight": (64, 64) for name in names}, model_type="llama")
    quantize_checkpoint(source, tmp_path / "out", exclude=[only(names[0])])
    convert_checkpoint(tmp_path / "out", tmp_path / "modelopt", to="modelopt")
    for made in ("out", "modelopt"):
        checkpoint = open_checkpoint(tmp_path / made)
        assert [*checkpoint.layers] == names[1:]
        assert [*header_faults(checkpoint)] == []
    assert names[0] in inspect_checkpoint(open_checkpoint(tmp_path / "out")).to_json()["claim"]["ignore"]


def test_a_name_has_a_pattern_of_its_own():
    names = ["layers.0.q_proj", "layers[0].q_proj", "layers*.q_?roj", "re:layers", "[r]e:layers", "[[]!]"]
    for name in names:
        assert [other for other in names if matches(other, only(name))] == [name]
    assert only(names[0]) == names[0]


@pytest.mark.parametrize(
    ("operand", "pattern", "message"),
    [
        (
            "exclude",
            "q_proj",
            r"exclude needs patterns .*got 'q_proj', which matches none; '\*q_proj' matches 1, such as model",
        ),
        ("exclude", "re:self_attn", r"got 're:self_attn', which matches none; 're:\.\*self_attn' matches 3"),
        ("exclude", r"re:.*\.gate\.", r"got 're:\.\*\\\.gate\\\.', which matches none"),
        ("include", "*.gate_prj", r"include needs patterns .* similar names are gate_proj"),
        ("exclude", "nothing_like_it_at_all", "which matches none$"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(tmp_path, operand, pattern, message):
    source = folder(tmp_path / "in", {f"{name}.weight": (64, 64) for name in (*QKV, *MLP)})
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(source, tmp_path / "out", **{operand: [pattern]})
    assert left_in(tmp_path) == ["in"]


def test_lm_head_may_be_excluded_but_not_included_where_it_is_not_stored(tmp_path):
    source = folder(tmp_path / "in", {f"{MLP[2]}.weight": (64, 64)})
    assert quantize_checkpoint(source, tmp_path / "out", exclude=["lm_head"]).quantized == (f"{MLP[2]}.weight",)
    with pytest.raises(CheckpointError, match="include needs patterns that match a module, got 'lm_head'"):
        quantize_checkpoint(source, tmp_path / "other", include=["model.layers.*", "lm_head"])


def test_a_plan_writes_nothing_and_says_what_is_written_then(tmp_path):
    source = folder(tmp_path / "in", {f"{name}.weight": (64, 64) for name in (*QKV, "lm_head")})
    plan = plan_checkpoint(source, tmp_path / "out", scheme="tensor")
    assert left_in(tmp_path) == ["in"]
    summary = quantize_checkpoint(source, tmp_path / "out", scheme="tensor")
    assert summary.plan == plan
    found = read(tmp_path / "out" / "model.safetensors")
    assert {name.removesuffix("_scale") for name in found if name.endswith("_scale")} == set(summary.quantized)
    assert plan.bytes_after == (tmp_path / "out" / "model.safetensors").stat().st_size
