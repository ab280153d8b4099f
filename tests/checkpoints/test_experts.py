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
from fp8core.errors import CheckpointError
from package.test_checkpoint import left_in, normal, read, write

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


def transposed(tensors):
    return {**tensors, f"{EXPERTS}.gate_up_proj": tensors[f"{EXPERTS}.gate_up_proj"].transpose(0, 2, 1).copy()}


def square(tensors):
    return {f"{EXPERTS}.down_proj": normal(E, HIDDEN, HIDDEN)}


WRONG = [
    (transposed, None, r"gate_up_proj needs experts stored \[out, in\], got \[3, 192, 256\], \[in, out\]"),
    (lambda tensors: tensors, {}, "split_experts needs hidden_size in the config.json"),
    (lambda tensors: tensors, {"hidden_size": 64}, "neither way for a hidden size of 64"),
    (square, None, "needs shapes that tell rows from columns, got squares of 192"),
    (lambda tensors: tensors | {f"{EXPERTS}.gate_up_proj_bias": normal(E, 2)}, None, "experts without biases"),
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
    with pytest.raises(CheckpointError, match="needs scales that part gate from up, got a block across both"):
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
