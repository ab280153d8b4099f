"""What `quantize_checkpoint` writes: the reference's bits, and all else as it was."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import fp8core
from fp8core.checkpoint import convert_checkpoint, quantize_checkpoint
from fp8core.checkpoint.disk import files
from fp8core.errors import CheckpointError
from support import reference
from support.checkpoints import (  # noqa: F401
    DTYPES,
    GROUPS,
    LINEARS,
    is_ignored,
    left_in,
    model,
    normal,
    read,
    shards,
    source,
    target,
    write,
)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scheme", GROUPS)
def test_weights_and_scales_are_the_reference_bit_for_bit_and_the_rest_is_copied(tmp_path, scheme, dtype):
    tensors = model(dtype)
    source = write(tmp_path / "in.safetensors", tensors)
    summary = quantize_checkpoint(source, tmp_path / "out.safetensors", scheme=scheme)
    found = read(tmp_path / "out.safetensors")
    assert set(summary.quantized) == LINEARS
    assert set(found) == set(tensors) | {f"{name}_scale" for name in LINEARS}
    assert summary.bytes_after == (tmp_path / "out.safetensors").stat().st_size
    assert summary.bytes_before == source.stat().st_size
    for name, tensor in tensors.items():
        if name not in LINEARS:
            assert found[name].dtype == tensor.dtype
            assert found[name].tobytes() == tensor.tobytes()
            continue
        n, k = tensor.shape
        shape = {"channel": (n, 1), "tensor": (1,), "block": (math.ceil(n / 128), math.ceil(k / 128))}[scheme]
        want = reference.quantize(tensor.astype(np.float32), "float8_e4m3fn", GROUPS[scheme])
        data, scale = found[name], found[f"{name}_scale"]
        assert (data.dtype, data.shape) == (ml_dtypes.float8_e4m3fn, tensor.shape)
        assert (scale.dtype, scale.shape) == (np.float32, shape)
        np.testing.assert_array_equal(data.view(np.uint8), np.asarray(want[0]).view(np.uint8))
        np.testing.assert_array_equal(scale.ravel(), np.asarray(want[1]).ravel())


@pytest.mark.parametrize(("given", "named"), [({}, "pt"), ({"format": "np"}, "np")])
def test_a_new_file_names_the_framework_of_the_old_one_or_torch(tmp_path, given, named):
    """transformers refuses files that name none."""
    source, fp8, bf16 = (tmp_path / f"{name}.safetensors" for name in ("in", "fp8", "bf16"))
    save_file({"up.weight": normal(64, 32)}, source, given)
    quantize_checkpoint(source, fp8)
    assert files.read_header(fp8).metadata["format"] == named
    save_file(read(fp8), fp8, given)
    convert_checkpoint(fp8, bf16, to="bf16")
    assert files.read_header(bf16).metadata["format"] == named


def test_every_tensor_is_aligned_to_its_items_and_metadata_is_kept(source, target):
    quantize_checkpoint(source, target)
    raw = target.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header.pop("__metadata__") == {"format": "pt", "note": "ours", "fp8core": fp8core.__version__}
    start = 8 + int.from_bytes(raw[:8], "little")
    for tensor in header.values():
        assert (start + tensor["data_offsets"][0]) % DTYPES[tensor["dtype"]].itemsize == 0


@pytest.mark.parametrize(
    ("include", "exclude", "quantized"),
    [
        (None, (), LINEARS),
        (None, ("*.down_proj",), {"model.layers.0.self_attn.q_proj.weight"}),
        (["lm_head"], (), {"lm_head.weight"}),
        (["re:.*layers\\.\\d+\\.(self_attn|mlp)\\."], ("*.gate",), LINEARS),
        (["*"], ("*embed*", "*.gate"), {*LINEARS, "lm_head.weight"}),
    ],
)
def test_patterns_choose_the_layers_and_the_config_names_those_left_out(source, target, include, exclude, quantized):
    summary = quantize_checkpoint(source, target, include=include, exclude=exclude)
    assert set(summary.quantized) == quantized
    matrices = {name for name, tensor in model().items() if name.endswith(".weight") and tensor.ndim > 1}
    left = {name.removesuffix(".weight") for name in matrices - quantized}
    left |= {"lm_head"} - {q[:-7] for q in quantized}
    assert {module for module in [*left, *(q[:-7] for q in quantized)] if is_ignored(module, summary)} == left
    assert json.loads(summary.config_file.read_text()) == {"quantization_config": summary.quantization_config}
    assert summary.config_file == target.with_suffix(".config.json")


@pytest.mark.parametrize("given", [".", "model.safetensors.index.json"])
def test_a_folder_of_shards_becomes_a_folder_of_shards(tmp_path, given):
    source = shards(tmp_path / "in")
    target = tmp_path / "out"
    summary = quantize_checkpoint(source / given, target)
    assert left_in(tmp_path) == ["in", "out"]
    assert left_in(target) == [
        *(
            "1_Pooling",
            "config.json",
            "fp8core.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ),
        *("model.safetensors.index.json", "tokenizer.json"),
    ]
    assert set(summary.quantized) == LINEARS
    config = json.loads((target / "config.json").read_text())
    assert config == {"model_type": "llama", "hidden_size": 96, "quantization_config": summary.quantization_config}
    index = json.loads((target / "model.safetensors.index.json").read_text())
    found = {name: tensor for file in target.glob("*.safetensors") for name, tensor in read(file).items()}
    assert set(index["weight_map"]) == set(found)
    assert all(name in read(target / file) for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert summary.bytes_after == sum(file.stat().st_size for file in target.glob("*.safetensors"))


def test_a_folder_without_an_index_and_a_forced_replacement(tmp_path, source):
    target = tmp_path / "fp8"
    quantize_checkpoint(source.parent, target, scheme="tensor")
    assert left_in(target) == ["config.json", "fp8core.json", "model.safetensors"]
    with pytest.raises(CheckpointError, match="exists"):
        quantize_checkpoint(source.parent, target)
    quantize_checkpoint(source.parent, target, force=True)
    assert read(target / "model.safetensors")["model.layers.0.mlp.down_proj.weight_scale"].shape == (200, 1)
    assert left_in(tmp_path) == ["fp8", "in"]


def test_a_file_is_replaced_only_by_force(source, target):
    target.write_bytes(b"precious")
    with pytest.raises(CheckpointError, match=r"exists: .*--force"):
        quantize_checkpoint(source, target)
    assert target.read_bytes() == b"precious"
    quantize_checkpoint(source, target, force=True)
    assert len(read(target)) == len(model()) + 2


def test_progress_counts_every_byte_of_the_source(source, target):
    calls = []
    quantize_checkpoint(source, target, progress=lambda *call: calls.append(call))
    total = sum(tensor.nbytes for tensor in model().values())
    assert {name for name, _, _ in calls} == set(model()) - {"model.empty.weight"}
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert calls[-1][1:] == (total, total)


def test_float64_is_quantized_as_its_float32_value(tmp_path):
    weight = np.random.default_rng(5).standard_normal((200, 256))
    write(tmp_path / "in.safetensors", {"layer.weight": weight})
    quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", scheme="block")
    found = read(tmp_path / "out.safetensors")
    want = reference.quantize(weight.astype(np.float32), "float8_e4m3fn", GROUPS["block"])
    np.testing.assert_array_equal(found["layer.weight"].view(np.uint8), np.asarray(want[0]).view(np.uint8))
    np.testing.assert_array_equal(found["layer.weight_scale"], np.asarray(want[1]))
    weight[3, 7] = 1e300
    write(tmp_path / "in.safetensors", {"layer.weight": weight})
    with pytest.raises(CheckpointError, match="needs finite values, got NaN, Inf or numbers beyond float32"):
        quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", force=True)


@pytest.mark.parametrize("size", [1, 2.0**-20], ids=["usual", "tiny"])
@pytest.mark.parametrize("scheme", GROUPS)
def test_parts_of_a_tensor_that_are_read_one_by_one_give_the_same_bytes(tmp_path, monkeypatch, scheme, size):
    rows = np.linspace(1, 9, 700, dtype=np.float32)[:, None]  # the largest is in the last part
    weight = normal(700, 384) * rows * np.float32(size)  # tiny rows have the least scale of a channel
    source = write(tmp_path / "in.safetensors", {"layer.weight": weight, "other": normal(150_000)})
    quantize_checkpoint(source, tmp_path / "whole.safetensors", scheme=scheme)
    monkeypatch.setattr(files, "AT_ONCE", 128 * 384 * 4 * 2)
    calls = []
    quantize_checkpoint(
        source, tmp_path / "parts.safetensors", scheme=scheme, progress=lambda *call: calls.append(call)
    )
    assert len(calls) == 5  # 256 + 256 + 188 rows, and two parts of the tensor that is copied
    assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    want = reference.quantize(weight, "float8_e4m3fn", GROUPS[scheme])
    np.testing.assert_array_equal(read(tmp_path / "parts.safetensors")["layer.weight_scale"].ravel(), np.ravel(want[1]))
