"""Which files of a folder belong to a checkpoint, which are copied, and what may not be read."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from fp8core.checkpoint import convert_checkpoint, open_checkpoint, quantize_checkpoint
from fp8core.errors import CheckpointError
from support.checkpoint_folders import source  # noqa: F401
from support.checkpoints import left_in, model, normal, read, shards, write

ROOT = Path(__file__).resolve().parents[2]


def test_weights_in_subfolders_are_copied_and_other_forms_are_left_out_by_name(tmp_path, source):
    (source / "2_Dense").mkdir()
    write(source / "2_Dense" / "model.safetensors", {"linear.weight": normal(32, 32)})
    (source / "2_Dense" / "pytorch_model.bin").write_bytes(b"dense")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_bytes(b"onnx")
    (source / "latest").symlink_to(source / "2_Dense")
    for name in ("consolidated.safetensors", "pytorch_model.bin", "model.gguf", "tf_model.h5", ".gitattributes"):
        (source / name).write_bytes(b"big")
    (source / "pytorch_model.bin.index.json").write_text("{}")
    write(source / "model.fp16.safetensors", model())
    write(source / "mtp.safetensors", {"mtp.0.proj.weight": normal(32, 32)})
    summary = quantize_checkpoint(source, tmp_path / "out")
    extras = {extra.name: (extra.copied, extra.reason) for extra in summary.plan.extras}
    assert {name for name, (copied, _) in extras.items() if not copied} == {
        *("consolidated.safetensors", "pytorch_model.bin", "model.gguf", "tf_model.h5", ".gitattributes", "onnx/"),
        *("pytorch_model.bin.index.json", "model.fp16.safetensors", "latest/"),
    }
    assert all(reason for copied, reason in extras.values() if not copied)
    assert extras["2_Dense/model.safetensors"] == (True, "in a subfolder")
    assert extras["mtp.safetensors"] == (True, "not in the index")
    assert extras["tokenizer.json"] == (True, "")
    for name in ("2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "mtp.safetensors", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert left_in(tmp_path / "out") == [
        *("2_Dense", "config.json", "fp8core.json", "model.safetensors", "mtp.safetensors", "tokenizer.json")
    ]
    quantize_checkpoint(source, tmp_path / "out", force=True)  # all of it is known to be ours


def test_a_folder_whose_weights_are_all_below_names_where(tmp_path):
    places = "unet", "snapshots/0123abcd"  # as in folders of diffusers, and in a cache of downloads
    for place in places:
        (tmp_path / "in" / place).mkdir(parents=True)
        write(tmp_path / "in" / place / "model.safetensors", {"a.weight": normal(4, 4)})
    said = f"holds no safetensors file; there are some in {', '.join(sorted(places))}: give one of these"
    with pytest.raises(CheckpointError, match=said):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json", "hf_quant_config.json"])
def test_a_file_that_leads_nowhere_is_refused(tmp_path, source, name):
    """As in a cache of downloads that has lost a file: it is not as if there were none."""
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(tmp_path / "lost")
    with pytest.raises(CheckpointError, match=f"cannot read .*{name}: No such file"):
        quantize_checkpoint(source, tmp_path / "out")


OTHER = "diffusion_pytorch_model.safetensors.index.json"


def test_an_index_of_another_name_keeps_it(tmp_path):
    source = shards(tmp_path / "in")
    (source / "model.safetensors.index.json").rename(source / OTHER)
    quantize_checkpoint(source, tmp_path / "out")
    convert_checkpoint(tmp_path / "out", tmp_path / "bf16", to="bf16")
    for made in ("out", "bf16"):
        places = json.loads((tmp_path / made / OTHER).read_text())["weight_map"]
        assert places == {name: file.name for file in (tmp_path / made).glob("*.safetensors") for name in read(file)}


def test_the_index_that_is_given_counts(tmp_path):
    source = shards(tmp_path / "in")
    write(source / "other.safetensors", {"a.weight": normal(4, 4)})
    (source / OTHER).write_text(json.dumps({"weight_map": {"a.weight": "other.safetensors"}}))
    assert [one.name for one in open_checkpoint(source / OTHER).tensors()] == ["a.weight"]
    assert "a.weight" not in open_checkpoint(source).all_tensors
    with pytest.raises(CheckpointError, match=r"cannot read .*no\.index\.json: No such file or directory"):
        open_checkpoint(source / "no.index.json")
    (source / "model.safetensors.index.json").rename(source / "more.safetensors.index.json")
    with pytest.raises(CheckpointError, match=f"needs one index, got {OTHER} and more.* give the path of one"):
        open_checkpoint(source)


@pytest.mark.parametrize("value", [3, None, ["a"], {"a": 1}])
def test_a_weight_map_of_other_things_than_names_is_a_plain_message(tmp_path, source, value):
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": value}}))
    with pytest.raises(CheckpointError, match=r"weight_map of .* needs names of files, got .* for a\.weight"):
        quantize_checkpoint(source, tmp_path / "out")


def test_a_name_counts_as_repeated_where_the_weight_map_has_it_twice(tmp_path):
    write(tmp_path / "model.safetensors", {"a.weight": normal(4, 4)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"a.weight": [1]}, "weight_map": {"a.weight": "model.safetensors"}}')
    assert [tensor.name for tensor in open_checkpoint(tmp_path).tensors()] == ["a.weight"]
    index.write_text('{"weight_map": {"a.weight": [1], "a.weight": "model.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"names a\.weight 2 times, in \[1\] and model\.safetensors"):
        open_checkpoint(tmp_path)


def test_two_tensors_of_one_name_without_an_index_are_refused(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        write(tmp_path / "in" / f"{name}.safetensors", {"x.weight": normal(4, 4)})
    with pytest.raises(
        CheckpointError, match=r"one tensor of each name, got x\.weight in a\.safetensors and b\.safetensors"
    ):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out")


UNREADABLE = """
import os, sys, tempfile
from fp8core.checkpoint import quantize_checkpoint
from fp8core.errors import CheckpointError
if os.geteuid() == 0:  # whom no permission holds back
    with tempfile.TemporaryDirectory() as folder:  # imports all that is needed, from where others may not read
        quantize_checkpoint(sys.argv[1], folder + "/out")
    os.setegid(65534)
    os.seteuid(65534)
try:
    quantize_checkpoint(sys.argv[1], sys.argv[2])
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("closed", ["in/model.safetensors", "in/config.json", "in/tokenizer.json", "in", "."])
def test_what_may_not_be_read_or_written_says_so(source, closed):
    with tempfile.TemporaryDirectory() as name:  # pytest's folders are closed to the user that root becomes
        folder = Path(name)
        shutil.copytree(source, folder / "in")
        folder.chmod(0o777)
        (folder / closed).chmod(0 if closed != "." else 0o555)
        command = [sys.executable, "-c", UNREADABLE, "in", "out"]  # relative: the folders above may be closed, too
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
        (folder / closed).chmod(0o755)
        assert (run.returncode, run.stderr) == (0, "")
        verb, what = ("write", "out") if closed == "." else ("read", closed)
        assert run.stdout.startswith(f"cannot {verb} {what}")
        assert "Permission denied" in run.stdout
        assert left_in(folder) == ["in"]


@pytest.mark.parametrize("counts", [1, 2])
def test_the_index_says_which_of_two_tensors_of_a_name_counts_also_in_the_new_one(tmp_path, counts):
    source, names = tmp_path / "twice", [f"model-0000{at}-of-00002.safetensors" for at in (1, 2)]
    source.mkdir()
    for at, name in enumerate(names, 1):
        write(source / name, {"up.weight": np.full((64, 32), at, np.float32), f"{at}.bias": np.ones(4, np.float32)})
    (source / "config.json").write_text("{}")
    weight_map = {"up.weight": names[counts - 1], "1.bias": names[0], "2.bias": names[1]}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    quantize_checkpoint(source, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {**weight_map, "up.weight_scale": names[counts - 1]}
    assert open_checkpoint(tmp_path / "out").layers["up"].scales().max() == np.float32(counts / 448)
