"""Where a checkpoint may be written, what --force replaces, what is copied, and what killed runs leave."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from fp8core.checkpoint import plan_checkpoint, quantize_checkpoint, replacing, writing
from fp8core.errors import CheckpointError
from support.checkpoints import left_in, model, normal, read, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "model.safetensors", model())
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def scheme_in(folder):
    return json.loads((folder / "fp8core.json").read_text())["scheme"]


def test_force_replaces_a_folder_that_it_wrote_and_nothing_else_in_it(tmp_path, source):
    target = tmp_path / "out"
    quantize_checkpoint(source, target)
    quantize_checkpoint(source, target, scheme="tensor", force=True)
    assert scheme_in(target) == "tensor"
    (target / "notes").mkdir()
    (target / "notes" / "thesis.tex").write_text("years")
    with pytest.raises(CheckpointError, match=r"it holds notes/thesis\.tex, which fp8core did not write"):
        quantize_checkpoint(source, target, force=True)
    assert (target / "notes" / "thesis.tex").read_text() == "years"
    (target / "notes" / "thesis.tex").unlink()
    (target / "link").symlink_to(source)
    with pytest.raises(CheckpointError, match="it holds link, which"):
        quantize_checkpoint(source, target, force=True)


def test_force_does_not_replace_what_was_changed_since(tmp_path, source):
    target = tmp_path / "out"
    quantize_checkpoint(source, target)
    (target / "tokenizer.json").write_text('{"mine": 1}')
    with pytest.raises(CheckpointError, match=r"will not replace .*: tokenizer\.json changed since fp8core wrote it"):
        quantize_checkpoint(source, target, force=True)
    (target / "tokenizer.json").unlink()  # what is gone is not lost by it
    quantize_checkpoint(source, target, force=True)


@pytest.mark.parametrize("config", ["{", "[]"])
def test_a_strangers_config_beside_a_file_is_no_obstacle(tmp_path, source, config):
    (source / "config.json").write_text(config)
    assert len(quantize_checkpoint(source / "model.safetensors", tmp_path / "out.safetensors").quantized) == 2
    with pytest.raises(CheckpointError, match="JSON"):
        quantize_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize("record", [None, "{", "[]", '{"files": 3}', '{"files": {}}'])
def test_force_replaces_no_strangers_folder_of_models(tmp_path, source, record):
    target = tmp_path / "models"
    (target / "other").mkdir(parents=True)
    write(target / "model.safetensors", {"a.weight": normal(4, 4)})
    write(target / "other" / "model.safetensors", {"a.weight": normal(4, 4)})
    if record is not None:
        (target / "fp8core.json").write_text(record)
    before = sorted(target.rglob("*"))
    with pytest.raises(CheckpointError, match="will not replace"):
        quantize_checkpoint(source, target, force=True)
    assert sorted(target.rglob("*")) == before


def test_an_empty_folder_is_replaced_by_force(tmp_path, source):
    (tmp_path / "out").mkdir()
    quantize_checkpoint(source, tmp_path / "out", force=True)
    assert scheme_in(tmp_path / "out") == "channel"


@pytest.mark.parametrize("exchanging", [True, False])
def test_a_link_to_a_folder_stays_one_and_leads_to_the_new_folder(tmp_path, source, exchanging, monkeypatch):
    if not exchanging:
        monkeypatch.setattr(replacing, "exchange", lambda *_: False)
    (tmp_path / "disk").mkdir()
    quantize_checkpoint(source, tmp_path / "disk" / "real")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    summary = quantize_checkpoint(source, tmp_path / "link", scheme="tensor", force=True)
    assert (tmp_path / "link").is_symlink()
    assert scheme_in(tmp_path / "disk" / "real") == "tensor"
    assert summary.config_file.exists()
    assert (left_in(tmp_path), left_in(tmp_path / "disk")) == (["disk", "in", "link"], ["real"])


def test_a_link_to_a_file_stays_one_and_leads_to_the_new_file(tmp_path, source):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real.safetensors").write_bytes(b"old")
    (tmp_path / "link.safetensors").symlink_to("disk/real.safetensors")
    quantize_checkpoint(source / "model.safetensors", tmp_path / "link.safetensors", force=True)
    assert (tmp_path / "link.safetensors").is_symlink()
    assert len(read(tmp_path / "disk" / "real.safetensors")) == len(model()) + 2
    assert left_in(tmp_path / "disk") == ["real.config.json", "real.safetensors"]


def test_links_in_a_circle_are_a_plain_message(tmp_path, source):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(CheckpointError, match=r"cannot write .*a: "):
        quantize_checkpoint(source, tmp_path / "a", force=True)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", [".", "..", "/dev/shm", "/"])
def test_the_current_folder_and_mount_points_are_refused_before_the_work(tmp_path, source, name, force, monkeypatch):
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    monkeypatch.setattr(writing.Shard, "write", lambda *_: pytest.fail("work was done"))
    with pytest.raises(CheckpointError, match=r"mount point|current folder|exists|outside of the source"):
        quantize_checkpoint(source, name, force=force)
    assert left_in(tmp_path) == ["here", "in"]


def test_a_mount_point_is_named(tmp_path, source, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "disk")
    with pytest.raises(CheckpointError, match="it is a mount point, which cannot be replaced: name a folder in it"):
        quantize_checkpoint(source, tmp_path / "disk", force=True)


def test_a_configuration_beside_the_target_that_is_no_file_is_not_replaced(tmp_path, source):
    (tmp_path / "out.config.json").mkdir()
    with pytest.raises(CheckpointError, match="not a plain file"):
        quantize_checkpoint(source / "model.safetensors", tmp_path / "out.safetensors", force=True)


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
    (tmp_path / "in" / "unet").mkdir(parents=True)
    write(tmp_path / "in" / "unet" / "model.safetensors", {"a.weight": normal(4, 4)})
    with pytest.raises(CheckpointError, match="holds no safetensors file; there are some in unet: give one of these"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("value", [3, None, ["a"], {"a": 1}])
def test_a_weight_map_of_other_things_than_names_is_a_plain_message(tmp_path, source, value):
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": value}}))
    with pytest.raises(CheckpointError, match=r"weight_map of .* needs names of files, got .* for a\.weight"):
        quantize_checkpoint(source, tmp_path / "out")


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


@pytest.mark.parametrize("closed", ["in/model.safetensors", "in/config.json", "in", "."])
def test_what_may_not_be_read_or_written_says_so(source, closed):
    with tempfile.TemporaryDirectory() as name:  # pytest's folders are closed to the user that root becomes
        folder = Path(name)
        shutil.copytree(source, folder / "in")
        folder.chmod(0o755)
        (folder / closed).chmod(0 if closed != "." else 0o555)
        command = [sys.executable, "-c", UNREADABLE, str(folder / "in"), str(folder / "out")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        (folder / closed).chmod(0o755)
        assert (run.returncode, run.stderr) == (0, "")
        verb, what = ("write", folder / "out") if closed == "." else ("read", folder / closed)
        assert run.stdout.startswith(f"cannot {verb} {what}")
        assert "Permission denied" in run.stdout
        assert left_in(folder) == ["in"]


HIDDEN = ".out.0123abcd.fp8core"


def leftover(tmp_path, name=HIDDEN):
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.safetensors").write_bytes(b"half")
    return tmp_path / name


def test_what_a_killed_run_left_is_named_and_removed(tmp_path, source):
    left = leftover(tmp_path)
    with pytest.warns(RuntimeWarning, match=rf"{left} was left by a run that was killed: the next one removes it"):
        plan_checkpoint(source, tmp_path / "out")
    assert left.exists()
    with pytest.warns(RuntimeWarning, match=rf"{left} was left by a run that was killed: removed") as caught:
        quantize_checkpoint(source, tmp_path / "out")
    assert caught[0].filename == __file__  # whose line is shown with it
    assert left_in(tmp_path) == ["in", "out"]


@pytest.mark.parametrize("name", [".out.safetensors.0123abcd.fp8core", ".out.config.json.0123abcd.fp8core"])
def test_a_file_that_a_killed_run_left_is_removed(tmp_path, source, name):
    (tmp_path / name).write_bytes(b"half")
    with pytest.warns(RuntimeWarning, match="removed"):
        quantize_checkpoint(source / "model.safetensors", tmp_path / "out.safetensors")
    assert left_in(tmp_path) == ["in", "out.config.json", "out.safetensors"]


@pytest.mark.parametrize("name", [".out.0123abcd.tmp", ".out.0123.fp8core", ".other.0123abcd.fp8core", "out.fp8core"])
def test_names_that_are_not_its_own_are_left_alone(tmp_path, source, name):
    left = leftover(tmp_path, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_checkpoint(source, tmp_path / "out")
    assert left.exists()


def test_a_target_that_another_run_is_writing_is_refused(tmp_path, source):
    left = leftover(tmp_path)
    handle = os.open(left, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match=rf"another run is writing it, under the name {left}"):
        quantize_checkpoint(source, tmp_path / "out")
    os.close(handle)
    assert left_in(tmp_path) == [HIDDEN, "in"]


def test_what_is_being_written_is_locked(tmp_path, source):
    seen = []

    def look(*_):
        seen.extend(replacing.leftovers(tmp_path / "out"))

    quantize_checkpoint(source, tmp_path / "out", progress=look)
    assert seen
    assert all(left.busy for left in seen)


def test_a_folder_that_had_made_way_is_named_and_kept(tmp_path, source):
    old = leftover(tmp_path, ".out.0123abcd.fp8core-old")
    with pytest.warns(RuntimeWarning, match=rf"{old} is what .*out was before a killed run: rename it to have it back"):
        quantize_checkpoint(source, tmp_path / "out")
    assert old.exists()
    with pytest.warns(RuntimeWarning, match="removed"):  # the target is there by now
        quantize_checkpoint(source, tmp_path / "out", force=True)
    assert left_in(tmp_path) == ["in", "out"]


def test_an_old_folder_that_cannot_be_removed_is_no_failure_to_write(tmp_path, source, monkeypatch):
    target = tmp_path / "out"
    quantize_checkpoint(source, target)
    removing = replacing.shutil.rmtree

    def refusing(path, *rest, **keywords):
        if Path(path).name.endswith(".fp8core"):
            raise PermissionError(13, "Permission denied", str(path))
        removing(path, *rest, **keywords)

    monkeypatch.setattr(replacing.shutil, "rmtree", refusing)
    with pytest.raises(CheckpointError, match=r"Permission denied; .*out is the new one; .*\.fp8core was left behind"):
        quantize_checkpoint(source, target, scheme="tensor", force=True)
    assert scheme_in(target) == "tensor"


def test_a_configuration_is_taken_back_where_the_weights_cannot_appear(tmp_path, source, monkeypatch):
    target = tmp_path / "out.safetensors"
    quantize_checkpoint(source / "model.safetensors", target)
    before = {name: (tmp_path / name).read_bytes() for name in ("out.safetensors", "out.config.json")}
    replace = Path.replace

    def refusing(path, other):
        if other.suffix == ".safetensors":
            raise OSError(16, "Device or resource busy")
        return replace(path, other)

    monkeypatch.setattr(Path, "replace", refusing)
    with pytest.raises(CheckpointError, match=r"resource busy; .* is as it was; nothing was left behind"):
        quantize_checkpoint(source / "model.safetensors", target, scheme="tensor", force=True)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    target.unlink()
    (tmp_path / "out.config.json").unlink()
    with pytest.raises(CheckpointError, match="nothing was left behind"):
        quantize_checkpoint(source / "model.safetensors", target)
    assert left_in(tmp_path) == ["in"]
