"""fp8core.checkpoint: what is written, what is refused, and what is left when a run does not end well."""

import errno
import json
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors

import fp8core
from fp8core.checkpoint import files, quantize_checkpoint, writing
from fp8core.errors import CheckpointError
from support import reference

NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float64): "F64",
    np.dtype(np.int64): "I64",
    np.dtype(np.uint8): "U8",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
GROUPS = {"channel": (1, -1), "tensor": (-1, -1), "block": (128, 128)}


def write(path, tensors, metadata=None):
    """Write a safetensors file by hand: the library's NumPy front knows no float8."""
    header, end = {"__metadata__": metadata} if metadata else {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": NAMES[array.dtype], "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))
    return path


def read(path):
    """Read a safetensors file with the library."""
    found = safetensors.deserialize(path.read_bytes())
    return {name: np.frombuffer(t["data"], DTYPES[t["dtype"]]).reshape(t["shape"]) for name, t in found}


def normal(*shape, dtype=np.float32, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) / 16).astype(dtype)


def model(dtype=np.float32):
    """A checkpoint with one of everything."""
    return {
        "model.embed_tokens.weight": normal(50, 128, dtype=dtype),
        "model.layers.0.self_attn.q_proj.weight": normal(96, 128, dtype=dtype, seed=1),
        "model.layers.0.self_attn.q_proj.bias": normal(96, dtype=dtype, seed=2),
        "model.layers.0.mlp.down_proj.weight": normal(200, 256, dtype=dtype, seed=3),
        "model.layers.0.mlp.gate.weight": normal(8, 128, dtype=dtype, seed=4),
        "model.layers.0.mlp.experts.weight": normal(2, 32, 128, dtype=dtype, seed=5),
        "model.layers.0.input_layernorm.weight": normal(128, dtype=dtype, seed=6),
        "model.steps.weight": np.arange(6).reshape(2, 3),
        "model.empty.weight": np.zeros((0, 128), dtype),
        "lm_head.weight": normal(50, 128, dtype=dtype, seed=7),
    }


LINEARS = {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"}


def is_ignored(module, summary):
    """Whether readers take a module of this name for one that is not quantized."""
    return any(
        re.match(one[3:], module) if one.startswith("re:") else one == module
        for one in summary.quantization_config["ignore"]
    )


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in").mkdir()
    return write(tmp_path / "in" / "model.safetensors", model(), {"format": "pt", "note": "ours"})


@pytest.fixture
def target(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "fp8.safetensors"


def left_in(folder):
    return sorted(p.name for p in folder.iterdir())


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


def shards(folder):
    """A folder with two shards, their index, a config and other files."""
    folder.mkdir()
    names = list(model())
    files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, held in files.items():
        write(folder / file, {name: model()[name] for name in held})
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 96}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"not copied")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


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


def changed(**tensors):
    return lambda path: write(path, model() | {name.replace("__", "."): t for name, t in tensors.items()})


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def not_finite(value):
    weight = normal(4, 128)
    weight[2, 5] = value
    return changed(model__layers__1__layer__weight=weight)


DAMAGE = {
    "truncated data": (truncated, "not a complete safetensors file"),
    "truncated header": (lambda path: path.write_bytes(path.read_bytes()[:60]), "not a complete safetensors file"),
    "trailing bytes": (lambda path: path.write_bytes(path.read_bytes() + b"xx"), "not a complete safetensors file"),
    "foreign": (lambda path: path.write_text("PK\x03\x04 a zip, say, and not what it should be"), "not a complete"),
    "empty": (lambda path: path.write_bytes(b""), "not a complete safetensors file"),
    "missing": (Path.unlink, "cannot read .*: No such file"),
    "fp8 already": (changed(a__weight=np.zeros((4, 4), ml_dtypes.float8_e4m3fn)), "quantized already"),
    "scaled already": (changed(a__weight=normal(4, 4), a__weight_scale=normal(4, 1)), "quantized already"),
    "nothing to do": (lambda path: write(path, {"a.bias": normal(4)}), "has no weight to quantize"),
    "NaN": (not_finite(np.nan), r"layer\.weight of .* needs finite values"),
    "Inf": (not_finite(-np.inf), r"layer\.weight of .* needs finite values"),
}


@pytest.mark.parametrize("scheme", GROUPS)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bad_source_is_refused_and_nothing_is_left(source, target, damage, scheme):
    spoil, message = DAMAGE[damage]
    spoil(source)
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(source, target, scheme=scheme)
    assert left_in(target.parent) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "nvfp4"}, "scheme needs one of channel, tensor, block, static, mxfp8, got 'nvfp4'"),
        ({"include": ["re:("]}, "include needs regular expressions, got 're:\\('"),
        ({"exclude": ["*"]}, "has no weight to quantize"),
    ],
)
def test_bad_arguments_are_refused(source, target, arguments, message):
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(source, target, **arguments)
    assert left_in(target.parent) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("in/model.safetensors", "needs to be outside of the source"),
        ("nowhere/fp8.safetensors", "there is no folder"),
        ("out/fp8.bin", r"needs to end in \.safetensors"),
    ],
)
def test_bad_targets_are_refused(tmp_path, source, target, name, message):
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(source, tmp_path / name, force=True)
    assert left_in(source.parent) == ["model.safetensors"]


def test_a_folder_that_holds_other_things_is_not_replaced(tmp_path, source):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match=r"fp8core did not write it .* it holds letter\.txt"):
        quantize_checkpoint(source.parent, tmp_path / "home", force=True)
    with pytest.raises(CheckpointError, match="needs to be outside"):
        quantize_checkpoint(source.parent, tmp_path, force=True)
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "needs a JSON object, got list"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": "../in/model-00001-of-00002.safetensors"}}', "which is not there"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "which is not there"),
        ('{"weight_map": {"a.weight": "model-00001-of-00002.safetensors"}}', r"says that a\.weight is in .* not"),
    ],
)
def test_a_bad_index_is_refused(tmp_path, index, message):
    source = shards(tmp_path / "in")
    (source / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(source, tmp_path / "out")
    assert left_in(tmp_path) == ["in"]


def test_a_folder_whose_config_says_that_it_is_quantized_is_refused(tmp_path):
    source = shards(tmp_path / "in")
    (source / "config.json").write_text('{"quantization_config": {}}')
    with pytest.raises(CheckpointError, match="quantized already: its config"):
        quantize_checkpoint(source, tmp_path / "out")


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("where", ["reserving", "writing"])
def test_a_full_disk_is_a_plain_message_and_leaves_nothing(tmp_path, source, target, monkeypatch, where, folder):
    if where == "reserving":
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(writing, "put", full)
    given, wanted = (source.parent, tmp_path / "fp8") if folder else (source, target)
    with pytest.raises(
        CheckpointError,
        match=r"no room on the disk \(.*\) for [\d,]+ bytes; [\d,]+ are free after cleaning up; nothing",
    ):
        quantize_checkpoint(given, wanted)
    assert left_in(target.parent) == []
    assert left_in(tmp_path) == ["in", "out"]


def test_too_little_room_is_seen_before_anything_is_written(source, target, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(CheckpointError, match="no room on the disk"):
        quantize_checkpoint(source, target)
    assert left_in(target.parent) == []


def test_a_file_size_limit_of_the_system_is_a_plain_message(source, target):
    code = "import sys; from fp8core.cli import main; sys.argv[0] = 'fp8core'; main()"

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    run = subprocess.run(
        [sys.executable, "-B", "-c", code, "quantize", str(source), str(target)],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith(f"error: cannot write {target}: File too large")
    assert "Traceback" not in run.stderr
    assert left_in(target.parent) == []


def test_a_folder_that_cannot_be_written_is_a_plain_message(source, target, monkeypatch):
    opened = Path.open

    def refusing(path, mode="r", **kwargs):
        if "x" in mode:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, mode, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)  # and not by chmod: root writes wherever it likes
    with pytest.raises(CheckpointError, match=rf"cannot write {target}: Permission denied; nothing was left behind"):
        quantize_checkpoint(source, target)


@pytest.mark.parametrize("before", [None, b"precious"])
def test_an_interrupted_run_leaves_what_was_there(source, target, before):
    if before is not None:
        target.write_bytes(before)

    def stop(name, done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, target, force=True, progress=stop)
    assert left_in(target.parent) == ([] if before is None else [target.name])
    assert before is None or target.read_bytes() == before


def test_an_interrupted_folder_leaves_the_old_one(tmp_path, source):
    target = tmp_path / "fp8"
    quantize_checkpoint(source.parent, target)
    before = (target / "model.safetensors").read_bytes()

    def stop(name, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source.parent, target, scheme="tensor", force=True, progress=stop)
    assert (target / "model.safetensors").read_bytes() == before
    assert left_in(tmp_path) == ["fp8", "in"]


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


@pytest.mark.parametrize("scheme", GROUPS)
def test_parts_of_a_tensor_that_are_read_one_by_one_give_the_same_bytes(tmp_path, monkeypatch, scheme):
    weight = normal(700, 384) * np.linspace(1, 9, 700, dtype=np.float32)[:, None]  # the largest is in the last part
    source = write(tmp_path / "in.safetensors", {"layer.weight": weight, "other": normal(3000)})
    quantize_checkpoint(source, tmp_path / "whole.safetensors", scheme=scheme)
    monkeypatch.setattr(files, "AT_ONCE", 128 * 384 * 4 * 2)
    calls = []
    quantize_checkpoint(
        source, tmp_path / "parts.safetensors", scheme=scheme, progress=lambda *call: calls.append(call)
    )
    assert len(calls) == 4  # 256 + 256 + 188 rows, and the tensor that is copied
    assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    want = reference.quantize(weight, "float8_e4m3fn", GROUPS[scheme])
    np.testing.assert_array_equal(read(tmp_path / "parts.safetensors")["layer.weight_scale"].ravel(), np.ravel(want[1]))
