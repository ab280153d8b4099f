"""Stacked experts as tensors of their own: the same numbers under the names that readers know."""

import json

import numpy as np
import pytest

from fp8core.checkpoint import (
    convert_checkpoint,
    open_checkpoint,
    plan_checkpoint,
    quantize_checkpoint,
    verify_checkpoint,
)
from fp8core.checkpoint.disk import files
from fp8core.checkpoint.disk.source import scan
from fp8core.checkpoint.reading.experts import split_experts
from fp8core.checkpoint.reading.reader import checkpoint_of
from fp8core.checkpoint.shapes.linear import LayerShape, layers_of
from fp8core.checkpoint.shapes.mixtures import mixtures_of
from fp8core.errors import CheckpointError
from support.checkpoints import left_in, normal, read, write

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from support import checkpoint_formats as written  # noqa: E402

E, INNER, HIDDEN = 3, 128, 192
EXPERTS = "model.layers.0.mlp.experts"


def folder(path, tensors, config=None, index=False):
    path.mkdir()
    write(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps({"hidden_size": HIDDEN} if config is None else config))
    if index:
        weight_map = dict.fromkeys(tensors, "model.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def stacked(dtype=np.float32):
    return {
        f"{EXPERTS}.gate_up_proj": normal(E, 2 * INNER, HIDDEN, dtype=dtype),
        f"{EXPERTS}.down_proj": normal(E, HIDDEN, INNER, dtype=dtype, seed=1),
        "model.layers.0.mlp.gate.weight": normal(E, HIDDEN, dtype=dtype, seed=2),
    }


def one_by_one(tensors):
    """The same with an expert a tensor, by plain slices."""
    made = {}
    for number in range(E):
        gate_up = tensors[f"{EXPERTS}.gate_up_proj"][number]
        made[f"{EXPERTS}.{number}.gate_proj.weight"] = gate_up[:INNER]
        made[f"{EXPERTS}.{number}.up_proj.weight"] = gate_up[INNER:]
        made[f"{EXPERTS}.{number}.down_proj.weight"] = tensors[f"{EXPERTS}.down_proj"][number]
    return made | {name: one for name, one in tensors.items() if not name.startswith(EXPERTS)}


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
def test_the_file_is_that_of_experts_that_were_apart(tmp_path, scheme):
    source = folder(tmp_path / "in", stacked(), index=True)
    apart = folder(tmp_path / "apart", one_by_one(stacked()), index=True)
    if scheme == "block":  # k of gate and up is no multiple of 128, so all stay
        with pytest.raises(CheckpointError, match="k in multiples of 128"):
            quantize_checkpoint(source, tmp_path / "out", scheme=scheme, split_experts=True)
        return
    done = quantize_checkpoint(source, tmp_path / "out", scheme=scheme, split_experts=True)
    quantize_checkpoint(apart, tmp_path / "want", scheme=scheme)
    assert len(done.quantized) == 3 * E
    found, want = (read(tmp_path / name / "model.safetensors") for name in ("out", "want"))
    assert set(found) == set(want)
    for name, one in want.items():
        assert found[name].tobytes() == one.tobytes(), name
    for name in ("config.json", "model.safetensors.index.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((tmp_path / "want" / name).read_text())
    assert not verify_checkpoint(tmp_path / "out", against=apart).faults


def test_experts_that_are_left_out_are_written_one_by_one_too(tmp_path):
    source = folder(tmp_path / "in", {**stacked(), "model.layers.0.self_attn.o_proj.weight": normal(64, HIDDEN)})
    quantize_checkpoint(source, tmp_path / "out", split_experts=True, exclude=["*.experts.*"])
    found = read(tmp_path / "out" / "model.safetensors")
    for name, one in one_by_one(stacked()).items():
        np.testing.assert_array_equal(found[name], one)


def fp8(path, rows, cols, name, shape=lambda scale: scale):
    """Experts whose codes and scales torch made."""
    tensors, apart = {}, {}
    for part, weight in (
        ("gate_up_proj", stacked()[f"{EXPERTS}.gate_up_proj"]),
        ("down_proj", stacked()[f"{EXPERTS}.down_proj"]),
    ):
        n, k = weight.shape[1:]
        size = n if rows < 0 else rows, k if cols < 0 else cols
        codes, scales = zip(*(written.coded(torch.from_numpy(one), *size) for one in weight), strict=True)
        tensors[f"{EXPERTS}.{part}"] = torch.stack(codes)
        tensors[f"{EXPERTS}.{part}{name}"] = shape(torch.stack(scales)).contiguous()
        wide = torch.stack([written.values(*one, *size) for one in zip(codes, scales, strict=True)]).numpy()
        apart[f"{EXPERTS}.{part}"] = wide
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"hidden_size": HIDDEN}))
    return one_by_one(apart)


CASES = [
    (128, 128, "_scale_inv", lambda scale: scale),
    (1, -1, "_scale", lambda scale: scale),
    (-1, -1, "_scale", lambda scale: scale),
    (-1, -1, "_scale", lambda scale: scale.reshape(-1)),
]


@pytest.mark.parametrize(("rows", "cols", "name", "shape"), CASES)
def test_fp8_experts_are_split_with_their_scales_and_keep_their_codes(tmp_path, rows, cols, name, shape):
    wide = fp8(tmp_path / "in", rows, cols, name, shape)
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to="compressed-tensors", split_experts=True)
    assert not done.lossy
    convert_checkpoint(tmp_path / "out", tmp_path / "bf16", to="bf16")
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert set(found) == set(wide)
    for name, one in wide.items():
        assert torch.equal(found[name], torch.from_numpy(one).bfloat16()), name
    opened = open_checkpoint(tmp_path / "out")
    assert len(opened.layers) == 3 * E
    assert not verify_checkpoint(tmp_path / "out").faults


@pytest.mark.parametrize("dot", [".weight", ""], ids=["modules", "parameters"])
@pytest.mark.parametrize("static", [(E,), ()], ids=["each", "shared"])
def test_static_scales_are_split_with_the_experts(tmp_path, dot, static):
    fp8(tmp_path / "in", 1, -1, "_scale")
    tensors = {
        name.replace("_proj", f"_proj{dot}"): one
        for name, one in load_file(tmp_path / "in" / "model.safetensors").items()
    }
    given = {part: torch.full(static, number) for part, number in (("gate_up_proj", 0.25), ("down_proj", 0.5))}
    between = "." if dot else "_"
    tensors |= {f"{EXPERTS}.{part}{between}input_scale": one for part, one in given.items()}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to="compressed-tensors", split_experts=True)
    assert not done.lossy
    assert not done.quantization_config["config_groups"]["group_0"]["input_activations"]["dynamic"]
    found = {
        name: float(layer.input_scale.read().item()) for name, layer in open_checkpoint(tmp_path / "out").layers.items()
    }
    assert found == {
        f"{EXPERTS}.{number}.{part}": 0.5 if part == "down_proj" else 0.25
        for number in range(E)
        for part in ("gate_proj", "up_proj", "down_proj")
    }


def in_out(tensors):
    """The same with every expert stored [in, out]."""
    return {
        name: np.ascontiguousarray(one.transpose(0, 2, 1)) if one.ndim == 3 else one for name, one in tensors.items()
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("at_once", [1 << 25, 4096])
def test_experts_stored_in_out_are_those_stored_out_in(tmp_path, monkeypatch, dtype, at_once):
    monkeypatch.setattr(files, "AT_ONCE", at_once)  # some columns at a time
    source = folder(tmp_path / "in", in_out(stacked(dtype)))
    other = folder(tmp_path / "apart", one_by_one(stacked(dtype)))
    for scheme in ("channel", "mxfp8"):
        done = quantize_checkpoint(source, tmp_path / scheme, scheme=scheme, split_experts=True)
        quantize_checkpoint(other, tmp_path / f"{scheme}-want", scheme=scheme)
        assert len(done.quantized) == 3 * E
        found, want = (read(tmp_path / name / "model.safetensors") for name in (scheme, f"{scheme}-want"))
        assert set(found) == set(want)
        for name, one in want.items():
            assert found[name].tobytes() == one.tobytes(), name
        assert not verify_checkpoint(tmp_path / scheme, against=other).faults
    quantize_checkpoint(
        folder(tmp_path / "more", {**in_out(stacked(dtype)), "model.layers.0.self_attn.o_proj.weight": normal(64, HIDDEN)}),
        tmp_path / "kept", split_experts=True, exclude=["*.experts.*"],
    )  # fmt: skip
    found = read(tmp_path / "kept" / "model.safetensors")
    for name, one in one_by_one(stacked(dtype)).items():
        np.testing.assert_array_equal(found[name], one)


@pytest.mark.parametrize(
    ("rows", "cols", "shape"),
    [
        (1, -1, lambda scale: scale.mT),
        (1, -1, lambda scale: scale),  # FBGEMM's down_proj
        (64, 64, lambda scale: scale.mT),
        (-1, -1, lambda scale: scale),
    ],
)
def test_fp8_experts_stored_in_out_keep_their_codes(tmp_path, rows, cols, shape):
    wide = fp8(tmp_path / "in", rows, cols, "_scale", shape)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    for part in ("gate_up_proj", "down_proj"):
        tensors[f"{EXPERTS}.{part}"] = tensors[f"{EXPERTS}.{part}"].mT.contiguous()
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to="compressed-tensors", split_experts=True)
    assert not done.lossy
    convert_checkpoint(tmp_path / "in", tmp_path / "bf16", to="bf16", split_experts=True)
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert set(found) == set(wide)
    for name, one in wide.items():
        assert torch.equal(found[name], torch.from_numpy(one).bfloat16()), name
    for layer in open_checkpoint(tmp_path / "out").layers.values():
        codes = torch.from_numpy(layer.weight.read().view(np.uint8).copy()).view(torch.float8_e4m3fn)
        now = written.values(codes, torch.from_numpy(layer.scales()), *_sizes(layer))
        assert torch.equal(now, torch.from_numpy(wide[layer.weight.name])), layer.name


@pytest.mark.parametrize("inner", [INNER, HIDDEN])
def test_experts_of_fbgemm_have_a_scale_for_each_output(tmp_path, inner):
    """As transformers writes Llama 4: both weights [in, out], the scales of one [1, out], those of the other [out, 1]."""
    (tmp_path / "in").mkdir()
    tensors, want = {}, {}
    for part, (rows, cols) in {"gate_up_proj": (2 * inner, HIDDEN), "down_proj": (HIDDEN, inner)}.items():
        made = [written.coded(torch.from_numpy(normal(rows, cols, seed=seed)), 1, cols) for seed in range(E)]
        codes, scales = (torch.stack(one) for one in zip(*made, strict=True))
        tensors[f"{EXPERTS}.{part}"] = codes.mT.contiguous()
        tensors[f"{EXPERTS}.{part}_scale"] = scales if part == "down_proj" else scales.mT.contiguous()
        want[f"{EXPERTS}.{part}"] = torch.stack([written.values(*one, 1, cols) for one in made]).mT.bfloat16()
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    config = {"hidden_size": HIDDEN, "quantization_config": {"quant_method": "fbgemm_fp8"}}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    assert not verify_checkpoint(tmp_path / "in").faults
    convert_checkpoint(tmp_path / "in", tmp_path / "bf16", to="bf16")
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert {name: torch.equal(found[name], one) for name, one in want.items()} == dict.fromkeys(want, True)


def _sizes(layer):
    return [extent if size < 0 else size for size, extent in zip(layer.group_shape, layer.matrix_shape, strict=True)]


def test_a_tensor_that_is_read_by_columns_is_the_same_matrix(tmp_path):
    source = folder(tmp_path / "in", in_out(stacked()))
    checkpoint = checkpoint_of(split_experts(scan(source)))
    for name, one in one_by_one(stacked()).items():
        np.testing.assert_array_equal(checkpoint.all_tensors[name].read(), one)


def one_in_out(tensors):
    return {**tensors, f"{EXPERTS}.gate_up_proj": in_out(tensors)[f"{EXPERTS}.gate_up_proj"]}


def square(tensors):
    return {f"{EXPERTS}.down_proj": normal(E, HIDDEN, HIDDEN)}


WRONG = [
    (one_in_out, None, r"needs the hidden size, 192, on the axis where the module's others have it, got \[3, 1"),
    (
        lambda tensors: in_out(tensors),
        {"hidden_size": HIDDEN, "model_type": "gpt_oss"},
        "got gpt_oss, which interleaves them",
    ),
    (lambda tensors: tensors, {}, "split_experts needs hidden_size in the config.json"),
    (lambda tensors: tensors, {"hidden_size": 64}, "needs the hidden size, 64, on the axis "),
    (
        lambda tensors: {f"{EXPERTS}.gate_up_proj": normal(E, 97, HIDDEN)},
        None,
        "gate and up of equal rows, got 97 rows",
    ),
    (
        lambda tensors: {f"{EXPERTS}.gate_up_proj": normal(E, HIDDEN, 97)},
        None,
        "gate and up of equal columns, got 97 col",
    ),
    (square, None, r"needs shapes that tell rows from columns, got \[192, 192\]"),
    (lambda tensors: tensors | {f"{EXPERTS}.gate_up_proj_bias": normal(E, 2)}, None, "experts without biases"),
    (
        lambda tensors: tensors | {f"{EXPERTS}.1.up_proj.weight": normal(INNER, HIDDEN)},
        None,
        r"makes .*experts\.1\.up_proj\.weight of .*gate_up_proj, but it already exists",
    ),
    (
        lambda tensors: tensors | {f"{EXPERTS}.up_proj": normal(E, INNER, HIDDEN)},
        None,
        r"makes .*experts\.0\.up_proj\.weight of .*, but it already exists",
    ),
    (lambda tensors: {"a.weight": normal(4, 8)}, None, "needs experts in tensors of 3 axes, got none"),
]


@pytest.mark.parametrize(("change", "config", "message"), WRONG)
def test_what_could_mean_two_things_is_refused(tmp_path, change, config, message):
    source = folder(tmp_path / "in", change(stacked()), config)
    with pytest.raises(CheckpointError, match=message):
        plan_checkpoint(source, split_experts=True)
    assert left_in(tmp_path) == ["in"]


def test_blocks_across_gate_and_up_are_refused(tmp_path):
    codes = torch.zeros(E, 448, HIDDEN).to(torch.float8_e4m3fn)
    (tmp_path / "in").mkdir()
    tensors = {f"{EXPERTS}.gate_up_proj": codes, f"{EXPERTS}.gate_up_proj_scale_inv": torch.ones(E, 4, 2)}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"hidden_size": HIDDEN}))
    with pytest.raises(CheckpointError, match="needs separate scales for gate and up, got a block across both"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", to="block", split_experts=True)


def test_a_mixture_with_stacked_experts_loads_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=128, hidden_size=256, intermediate_size=384, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=4, num_experts_per_tok=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    assert any(tensor.ndim == 3 for tensor in state.values())
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    config.save_pretrained(tmp_path / "in")
    done = quantize_checkpoint(tmp_path / "in", tmp_path / "out", split_experts=True)
    assert len(done.quantized) == 2 * (4 + 3 * 4)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.arange(48).reshape(2, 24)
    with torch.no_grad():
        want, got = model(tokens).logits, loaded.eval()(tokens).logits
    assert (got - want).norm() < 0.12 * want.norm()


@pytest.mark.parametrize("name", ["_scale_inv", "_scale"])
def test_shapes_of_stacked_experts_are_those_of_split_ones(tmp_path, name):
    rows, cols = (128, 128) if name == "_scale_inv" else (1, -1)
    fp8(tmp_path / "fp8", rows, cols, name)
    convert_checkpoint(tmp_path / "fp8", tmp_path / "apart", to="compressed-tensors", split_experts=True)
    config = {"hidden_size": HIDDEN, "num_experts_per_tok": 2}
    found = layers_of(tmp_path / "fp8")
    assert found == layers_of(tmp_path / "apart")
    (mixture,) = mixtures_of(found, config)
    assert mixture == (E, 2, HIDDEN, INNER, "block" if rows == 128 else "channel", True, False, "float8_e4m3fn")
    wide = folder(tmp_path / "wide", stacked())
    assert mixtures_of(layers_of(wide), config) == {(*mixture[:4], "channel", *mixture[5:]): [EXPERTS]}


def test_stacked_experts_that_cannot_be_split_are_left_out_of_the_shapes(tmp_path):
    biased = {
        **stacked(),
        f"{EXPERTS}.down_proj_bias": normal(E, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": normal(64, HIDDEN),
    }
    assert list(layers_of(folder(tmp_path / "biased", biased))) == [LayerShape(64, HIDDEN, "channel")]
    fp8(tmp_path / "fp8", 1, -1, "_scale")
    (tmp_path / "fp8" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"split_experts needs hidden_size in the config\.json"):
        layers_of(tmp_path / "fp8")


def test_shapes_of_a_layer_without_a_scale_are_not_known(tmp_path):
    codes = torch.ones(64, 64).to(torch.float8_e4m3fn)
    save_file({"layers.0.up_proj.weight": codes}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight of model\.safetensors needs a scale, got none"):
        layers_of(tmp_path / "model.safetensors")
