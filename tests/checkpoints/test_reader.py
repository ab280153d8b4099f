"""`open_checkpoint`: every format, written by other code, is named and read right, from its headers."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from fp8core.checkpoint import (
    convert_checkpoint,
    inspect_checkpoint,
    open_checkpoint,
    open_files,
    plan_checkpoint,
    plan_conversion,
    quantize_checkpoint,
    tune_checkpoint,
    verify_checkpoint,
)
from fp8core.checkpoint.disk.source import scan
from fp8core.checkpoint.formats import naming
from fp8core.checkpoint.reading.experts import split_experts
from fp8core.checkpoint.reading.reader import checkpoint_of
from fp8core.errors import CheckpointError
from support.checkpoints import fp8, normal, write

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from support.checkpoint_formats import FORMATS, autofp8, ct_channel, modelopt, small_state, write_format  # noqa: E402

ALL = pytest.mark.parametrize("writer", FORMATS, ids=lambda writer: writer.__name__)


@ALL
def test_every_format_is_named_and_its_layers_have_their_tensors(tmp_path, writer):
    out = write_format(writer, tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    name, granularity, kind = FORMATS[writer]
    assert checkpoint.format == name
    assert set(checkpoint.layers) == set(out.linears)
    for module, layer in checkpoint.layers.items():
        assert (layer.name, layer.weight.name, layer.format) == (module, f"{module}.weight", name)
        assert (layer.granularity, layer.scale_kind, layer.dtype) == (granularity, kind, "float8_e4m3fn")
        assert layer.matrix_shape == layer.weight.shape == tuple(out.tensors[f"{module}.weight"].shape)
        assert layer.experts is None
        assert not layer.fault()
    taken = {one.name for layer in checkpoint.layers.values() for one in layer.tensors()}
    rest = [tensor.name for tensor in checkpoint.tensors()]
    assert not taken & set(rest)
    assert taken | set(rest) == set(out.tensors)
    assert {name for name in taken if not name.endswith(".weight")} == {
        name for name in out.tensors for module in out.linears if name.startswith(module + ".")
        and not name.endswith((".weight", ".bias", ".k_scale", ".v_scale"))
    }  # fmt: skip


@ALL
def test_codes_and_scales_stand_for_what_was_written_bit_for_bit(tmp_path, writer):
    out = write_format(writer, tmp_path / "model")
    for layer in open_checkpoint(tmp_path / "model").layers.values():
        codes, scales = layer.weight.read(), layer.scales()
        assert scales.dtype == np.float32
        assert codes.base is not None
        n, k = layer.matrix_shape
        rows, cols = (size if size > 0 else whole for size, whole in zip(layer.group_shape, (n, k), strict=True))
        wide = scales.repeat(rows, 0).repeat(cols, 1)[:n, :k]
        expected = out.expected[layer.weight.name].numpy()
        np.testing.assert_array_equal((codes.astype(np.float32) * wide).view(np.uint32), expected.view(np.uint32))


@ALL
def test_a_format_is_the_same_from_the_files_that_a_loader_hands_over(tmp_path, writer):
    write_format(writer, tmp_path / "model")
    names = "config.json", "hf_quant_config.json"
    files = [tmp_path / "model" / name for name in names]
    config, modelopt = (json.loads(file.read_text()) if file.exists() else None for file in files)
    found = open_files([tmp_path / "model" / "model.safetensors"], config, modelopt)
    assert found.format == FORMATS[writer][0]
    assert list(found.layers.values()) == list(open_checkpoint(tmp_path / "model").layers.values())


@pytest.mark.parametrize(
    ("call", "operand", "got"),
    [
        (open_checkpoint, "path", 5),
        (open_checkpoint, "path", b"model"),
        (verify_checkpoint, "path", None),
        (lambda one: verify_checkpoint("whole", against=one), "against", 5),
        (lambda one: open_files([one]), "files", None),
        (plan_checkpoint, "source", 5),
        (lambda one: plan_checkpoint("whole", one), "target", 5),
        (lambda one: quantize_checkpoint("whole", one), "target", None),
        (lambda one: plan_conversion(one, to="bf16"), "source", 5),
        (lambda one: plan_conversion("codes", one, to="bf16"), "target", 5),
        (lambda one: convert_checkpoint("codes", one, to="bf16"), "target", 5),
        (tune_checkpoint, "source", 5),
    ],
)  # fmt: skip
def test_paths_that_are_none_are_refused_by_name(tmp_path, monkeypatch, call, operand, got):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole" / "model.safetensors", {"a.weight": normal(4, 8)})
    write_format(ct_channel, tmp_path / "codes")
    wanted = f"{operand} needs a str or an os.PathLike of one, got {got!r}"
    with pytest.raises(CheckpointError, match=re.escape(wanted)):
        call(got)
    with pytest.raises(CheckpointError, match=rf"{operand} needs a path without null characters, got 'a\\x00b'"):
        call("a\0b")


def test_a_path_in_place_of_a_list_or_a_checkpoint_is_refused(tmp_path):
    for path in (tmp_path, str(tmp_path)):
        with pytest.raises(CheckpointError, match="files needs a list of paths, got '"):
            open_files(path)
        with pytest.raises(CheckpointError, match="checkpoint needs a Checkpoint, as open_checkpoint returns it"):
            inspect_checkpoint(path)
    with pytest.raises(CheckpointError, match="files needs a list of paths, got 5"):
        open_files(5)


WITHOUT_CONFIG = {
    "deepseek": "fp8", "deepseek_v4": "fp8", "hf_static": "fp8", "ct_static": "compressed-tensors",
    "ct_channel": "compressed-tensors", "ct_block": "compressed-tensors", "modelopt": "modelopt",
    "modelopt_blocks": "modelopt", "fbgemm": "fbgemm_fp8", "autofp8": "autofp8", "comfyui_old": "comfyui",
    "comfyui_new": "comfyui", "comfyui_header": "comfyui", "mxfp8": "mxfp8", "mistral": "mistral",
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_CONFIG)
def test_without_a_configuration_the_tensors_tell(tmp_path, name):
    writer = next(one for one in FORMATS if one.__name__ == name)
    write_format(writer, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "alone.safetensors")
    found = open_checkpoint(tmp_path / "alone.safetensors")
    assert found.claim.format == ("comfyui" if name == "comfyui_header" else None)
    assert found.format == WITHOUT_CONFIG[name]
    assert all(layer.granularity == FORMATS[writer][1] for layer in found.layers.values())


def test_an_unquantized_checkpoint_has_no_layers(tmp_path):
    write(tmp_path / "model.safetensors", {"a.weight": normal(4, 8)})
    found = open_checkpoint(tmp_path)
    assert (found.format, dict(found.layers), [one.name for one in found.tensors()]) == (
        "unquantized",
        {},
        ["a.weight"],
    )


@pytest.mark.parametrize("counts", ["1.safetensors", "2.safetensors"])
def test_of_two_tensors_of_a_name_the_one_that_the_index_names_is_read(tmp_path, counts):
    numbers = {at: normal(4, 8, seed=at) for at in (1, 2)}
    files = [write(tmp_path / f"{at}.safetensors", {"a": one, f"own{at}": one}) for at, one in numbers.items()]
    weight_map = {"a": counts, "own1": "1.safetensors", "own2": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tensors = open_checkpoint(tmp_path).all_tensors
    assert {name: one.path.name for name, one in tensors.items()} == weight_map
    np.testing.assert_array_equal(tensors["a"].read(), numbers[int(counts[0])])
    assert open_files(files).all_tensors["a"].path == files[-1]


def test_columns_are_read_up_to_the_end_of_a_file(tmp_path):
    experts = normal(2, 32, 96)
    write(tmp_path / "model.safetensors", {"layers.0.experts.gate_up_proj": experts})
    (tmp_path / "config.json").write_text('{"hidden_size": 32}')
    tensors = checkpoint_of(split_experts(scan(tmp_path))).all_tensors
    for at, expert in enumerate(experts):
        for part, columns in (("gate", expert[:, :48]), ("up", expert[:, 48:])):
            np.testing.assert_array_equal(tensors[f"layers.0.experts.{at}.{part}_proj.weight"].read(), columns.T)


def test_the_scales_of_keys_and_values_are_known(tmp_path):
    from support.checkpoint_formats import modelopt

    write_format(modelopt, tmp_path / "model")
    assert open_checkpoint(tmp_path / "model").kv_scales() == {
        "model.layers.0.self_attn.k_proj.k_scale": "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_proj.v_scale": "model.layers.0.self_attn.v_scale",
    }


@pytest.mark.parametrize("method", ["Compressed-Tensors", "compressed_tensors"])
def test_the_method_is_read_as_vllm_reads_it(tmp_path, method):
    write_format(ct_channel, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["quant_method"] = method
    (tmp_path / "config.json").write_text(json.dumps(config))
    claim = open_checkpoint(tmp_path).claim
    assert (claim.format, claim.granularities) == ("compressed-tensors", {"channel"})


@pytest.mark.parametrize(
    ("name", "beside", "file"),
    [
        ("model", None, "config.json"),
        ("model", {"r": 16}, "config.json"),
        ("other", None, ""),
        ("other", {"r": 16}, ""),
        ("other", {"quantization_config": {"quant_method": "fp8"}}, "other.config.json"),
    ],
)
def test_the_configuration_of_a_folder_is_that_of_its_model_alone(tmp_path, name, beside, file):
    write_format(ct_channel, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / f"{name}.safetensors")
    if beside is not None:
        (tmp_path / f"{name}.config.json").write_text(json.dumps(beside))
    opened = open_checkpoint(tmp_path / f"{name}.safetensors")
    assert opened.claim.file == file
    assert opened.config.items() >= (beside or {}).items()


def test_a_mixture_of_modelopt_need_not_name_its_algorithm(tmp_path):
    write_format(ct_channel, tmp_path)
    layers = {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}
    section = {"quant_method": "modelopt_mixed", "quantized_layers": layers, "ignore": ["*.down_proj"]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    found = open_checkpoint(tmp_path)
    assert (found.format, found.claim.ignore) == ("modelopt", ("*.down_proj",))
    assert [fault.tensor for fault in inspect_checkpoint(found).faults] == ["model.layers.0.mlp.down_proj.weight"]


def test_scales_of_what_projections_return_do_not_make_files_those_of_modelopt(tmp_path):
    """AMD's Quark writes them, whose configuration fp8core does not know."""
    write_format(autofp8, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{key}_proj.output_scale": torch.tensor(0.5) for key in "kv"}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "quark"}}))
    found = open_checkpoint(tmp_path)
    assert (found.format, found.claim.variant, len(found.kv_scales())) == ("autofp8", "quark", 2)


@pytest.mark.parametrize("key", ["q", "k", "v"])
@pytest.mark.parametrize(
    "suffix", ["{}_proj.{}_scale", "{}_proj.output_scale", "attn.{}_scale", "{}_scale", "{}_fake_quantizer.qscale_act"]
)
def test_scales_of_attention_have_one_name(key, suffix):
    """ModelOpt, Quark, vLLM, compressed-tensors and Mistral's own files name them."""
    name = "layers.0.attention." + suffix.format(key, key)
    assert naming.kv_scale(name) == f"layers.0.attention.{key}_scale"
    assert naming.kv_scale("layers.0.attention.kv_fake_quantizer.qscale_act") == "layers.0.attention.kv_scale"


def test_a_norm_named_scale_is_no_scale_of_a_weight(tmp_path):
    write(tmp_path / "model.safetensors", {"norm.scale": normal(8), "norm.weight": normal(4, 8)})
    assert not open_checkpoint(tmp_path).layers


def test_the_fp8_scales_of_nvfp4_are_no_weights(tmp_path):
    tensors = {"a.weight": np.zeros((64, 16), np.uint8), "a.weight_scale": fp8(64, 2)}
    write(tmp_path / "model.safetensors", tensors | {"a.weight_scale_2": np.ones((), np.float32)})
    found = open_checkpoint(tmp_path)
    assert (found.format, dict(found.layers)) == ("unquantized", {})


INTEGERS = [f"{kind}{number}" for kind in ("int", "uint") for number in (8, 16, 32, 64)]
DTYPES = ["float64", "float32", "float16", "bfloat16", "complex64", "bool", *INTEGERS]


@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_tensors_of_every_dtype_can_be_read(tmp_path, dtype):
    tensor = torch.tensor([[1, 0], [0, 1]]).to(getattr(torch, dtype))
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path).all_tensors["a"].read()
    assert (found.dtype.name, found.shape) == (dtype, (2, 2))
    assert found.tobytes() == bytes(tensor.view(torch.uint8).flatten().tolist())


def test_only_headers_are_read_and_no_framework_is_imported(tmp_path):
    """A file whose numbers are a hole that would fill memory: 64 GB of FP8 that was never written."""
    name, n, k = "model.layers.0.mlp.up_proj.weight", 1 << 18, 1 << 18
    scale = [n // 128, k // 128]
    header = {
        name: {"dtype": "F8_E4M3", "shape": [n, k], "data_offsets": [0, n * k]},
        f"{name}_scale_inv": {"dtype": "F32", "shape": scale, "data_offsets": [n * k, n * k + 4 * scale[0] * scale[1]]},
    }
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + n * k + 4 * scale[0] * scale[1])
    code = f"""
import re, sys
from fp8core.checkpoint import open_checkpoint
def most():  # and not getrusage's ru_maxrss, which a child inherits from the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
before = most()
(layer,) = open_checkpoint({str(tmp_path)!r}).layers.values()
part = layer.weight.read()[5:7, :3]
assert part.shape == (2, 3) and not part.any()
grown = most() - before
assert grown < 8 << 10, grown
wrong = [name for name in ("torch", "jax", "cupy", "transformers") if name in sys.modules]
assert not wrong, wrong
print(layer.granularity)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "block\n"


def test_a_file_that_is_another_one_since_is_refused(tmp_path):
    """What was read before stays; the header that is known says where other numbers are now."""
    file = tmp_path / "model.safetensors"
    write(file, {"up.weight": fp8(64, 32), "up.weight_scale": np.full((64, 1), 0.5, np.float32)})
    (layer,) = open_checkpoint(file).layers.values()
    before, codes = layer.scales(), layer.weight.read()
    assert (before == 0.5).all()
    other = tmp_path / "other"
    write(other, {"up.weight": fp8(64, 32), "up.weight_scale": np.full((64, 1), 0.25, np.float32)})
    assert other.stat().st_size == file.stat().st_size
    written = file.stat().st_mtime_ns + 1_000_000  # as coarse as the file system's clock may be
    os.utime(other, ns=(written, written))
    other.replace(file)
    for read in (layer.scales, layer.weight.read):
        with pytest.raises(
            CheckpointError, match=r"cannot read .*model.safetensors: it was written since it was opened"
        ):
            read()
    assert (before == 0.5).all()
    np.testing.assert_array_equal(codes.view(np.uint8), fp8(64, 32).view(np.uint8))
    (layer,) = open_checkpoint(file).layers.values()
    assert (layer.scales() == 0.25).all()


def test_small_state_has_blocks_that_are_not_whole():
    assert {tuple(one.shape) for name, one in small_state().items() if "proj.weight" in name} == {(300, 200)}


@pytest.mark.parametrize("ask", [inspect_checkpoint, verify_checkpoint], ids=["inspect", "verify"])
def test_a_pattern_of_the_configuration_that_does_not_compile_is_named(tmp_path, ask):
    write_format(modelopt, tmp_path / "model")
    place = tmp_path / "model" / "hf_quant_config.json"
    content = json.loads(place.read_text())
    content["quantization"]["exclude_modules"] = ["lm_head", "re:("]
    place.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"not quantized needs regular expressions, got 're:\(': missing \)"):
        ask(open_checkpoint(tmp_path / "model") if ask is inspect_checkpoint else tmp_path / "model")
