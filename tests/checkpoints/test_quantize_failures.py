"""What `quantize_checkpoint` refuses, and what is left when a run does not end well: nothing."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fp8core.checkpoint import Fault, quantize_checkpoint, verify_checkpoint
from fp8core.checkpoint.disk import writing
from fp8core.errors import CheckpointError
from support.checkpoints import GROUPS, left_in, model, normal, shards, source, target, write  # noqa: F401


def changed(**tensors):
    return lambda path: write(path, model() | {name.replace("__", "."): t for name, t in tensors.items()})


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def not_finite(value):
    weight = normal(4, 128)
    weight[2, 5] = value
    return changed(model__layers__1__layer__weight=weight)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
DAMAGE = {
    "truncated data": (truncated, "not a complete safetensors file"),
    "truncated header": (lambda path: path.write_bytes(path.read_bytes()[:60]), "not a complete safetensors file"),
    "trailing bytes": (lambda path: path.write_bytes(path.read_bytes() + b"xx"), "not a complete safetensors file"),
    "foreign": (lambda path: path.write_text("PK\x03\x04 a zip, say, and not what it should be"), "not a complete"),
    "pointer": (lambda path: path.write_text(POINTER), "it is a pointer of Git LFS: git lfs pull downloads the file"),
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
        ({"scheme": ["fp8"]}, r"scheme needs one of channel, tensor, block, static, mxfp8, got \['fp8'\]"),
        ({"include": ["re:("]}, "include needs regular expressions, got 're:\\('"),
        ({"include": 5}, "include needs a list of patterns, got 5"),
        ({"exclude": "*"}, r"exclude needs a list of patterns, got '\*'"),
        ({"exclude": None}, "exclude needs a list of patterns, got None"),
        ({"exclude": [5]}, r"exclude needs a list of patterns, got \[5\]"),
        ({"input_scales": 0.5, "scheme": "static"}, "input_scales needs a mapping of layers to numbers, got 0.5"),
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
        ("[" * 100_000, "is not JSON: maximum recursion depth"),
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


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"quantization_config": {}}),
        ("config.json", {"compression_config": {"quant_method": "compressed-tensors"}}),
        ("config.json", {"text_config": {"quantization_config": {"quant_method": "fp8"}}}),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
    ],
)
def test_a_folder_whose_config_says_that_it_is_quantized_is_refused(tmp_path, file, content):
    source = shards(tmp_path / "in")
    (source / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"quantized already: its {re.escape(file)}"):
        quantize_checkpoint(source, tmp_path / "out")
    assert left_in(tmp_path) == ["in"]


def test_a_config_that_says_with_null_that_it_is_not_is_taken(tmp_path):
    source = shards(tmp_path / "in")
    (source / "config.json").write_text('{"model_type": "llama", "quantization_config": null}')
    summary = quantize_checkpoint(source, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {"model_type": "llama", "quantization_config": summary.quantization_config}


def test_a_source_that_is_taken_away_is_named(tmp_path):
    source = shards(tmp_path / "in")
    second = source / "model-00002-of-00002.safetensors"
    with pytest.raises(CheckpointError, match=rf"cannot read {re.escape(str(second))}: No such file or directory; not"):
        quantize_checkpoint(source, tmp_path / "out", progress=lambda *_: second.unlink(missing_ok=True))
    assert left_in(tmp_path) == ["in"]


def test_shards_that_others_count_but_that_are_missing_are_a_fault_without_an_index(tmp_path):
    source = shards(tmp_path / "in")
    (source / "model.safetensors.index.json").unlink()
    quantize_checkpoint(source, tmp_path / "out")
    for folder in (source, tmp_path / "out"):
        (folder / "model-00001-of-00002.safetensors").unlink()
    said = "the 2 shards that model-00002-of-00002.safetensors counts, got none named model-00001-of-00002.safetensors"
    with pytest.raises(CheckpointError, match=f"in needs {said}$"):
        quantize_checkpoint(source, tmp_path / "again")
    assert Fault("", "index", f"{tmp_path / 'out'} needs {said}") in verify_checkpoint(tmp_path / "out").faults
    only = source / "model-00002-of-00002.safetensors"
    assert quantize_checkpoint(only, tmp_path / "one.safetensors").quantized
    for i in (4, 5):
        only.with_name(f"x-0000{i}-of-00005.safetensors").write_bytes(only.read_bytes())
    only.unlink()
    with pytest.raises(
        CheckpointError, match=r"the 5 shards .*, got none named x-00001-of-00005\.safetensors and 2 more"
    ):
        quantize_checkpoint(source, tmp_path / "again")


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
