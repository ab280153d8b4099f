"""What killed runs leave beside a target, who is writing it, and what is taken back after a failure."""

import fcntl
import os
import warnings
from pathlib import Path

import pytest

from fp8core.checkpoint import plan_checkpoint, quantize_checkpoint
from fp8core.checkpoint.disk import replacing
from fp8core.errors import CheckpointError
from support.checkpoint_folders import scheme_in, source  # noqa: F401
from support.checkpoints import left_in

HIDDEN = ".out.0123abcd.fp8core"


def leftover(tmp_path, name=HIDDEN):
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.safetensors").write_bytes(b"half")
    return tmp_path / name


def test_what_a_killed_run_left_is_named_and_removed(tmp_path, source):
    left = leftover(tmp_path)
    with pytest.warns(
        RuntimeWarning, match=rf"{left} was left by a run that was killed: the next one removes it"
    ) as told:
        plan_checkpoint(source, tmp_path / "out")
    assert left.exists()
    with pytest.warns(RuntimeWarning, match=rf"{left} was left by a run that was killed: removed") as caught:
        quantize_checkpoint(source, tmp_path / "out")
    assert told[0].filename == caught[0].filename == __file__  # whose line is shown with it
    assert left_in(tmp_path) == ["in", "out"]


@pytest.mark.parametrize("name", [".out.safetensors.0123abcd.fp8core", ".out.config.json.0123abcd.fp8core"])
def test_a_file_that_a_killed_run_left_is_removed(tmp_path, source, name):
    (tmp_path / name).write_bytes(b"half")
    with pytest.warns(RuntimeWarning, match="removed"):
        quantize_checkpoint(source / "model.safetensors", tmp_path / "out.safetensors")
    assert left_in(tmp_path) == ["in", "out.config.json", "out.safetensors"]


@pytest.mark.parametrize("name", [".out.0123abcd.tmp", ".out.0123.fp8core", ".other.0123abcd.fp8core", "out.fp8core",
    ".out.0123abcd.fp8core.bak", "..out.0123abcd.fp8core"])  # fmt: skip
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
    with pytest.raises(CheckpointError, match=rf"another run is writing it, as {left}"):
        quantize_checkpoint(source, tmp_path / "out")
    assert not replacing.remove(replacing.Leftover(left, False))  # nor if the lock was taken since it was looked at
    os.close(handle)
    assert left_in(tmp_path) == [HIDDEN, "in"]


def test_a_link_in_the_place_of_a_leftover_is_neither_followed_nor_removed(tmp_path, source):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / HIDDEN).symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match=rf"another run is writing it, as {tmp_path / HIDDEN}; if none is"):
        quantize_checkpoint(source, tmp_path / "out")
    assert left_in(tmp_path) == [HIDDEN, "elsewhere", "in"]


def test_what_is_being_written_is_locked(tmp_path, source):
    seen = []

    def look(*_):
        seen.extend(replacing.leftovers(tmp_path / "out"))

    quantize_checkpoint(source, tmp_path / "out", progress=look)
    assert seen
    assert all(left.busy for left in seen)


@pytest.fixture
def forked(monkeypatch):
    """Open files stay open elsewhere, as in a child that another thread forks; and no folder can be removed."""
    opened, kept = os.open, []

    def open_twice(*arguments, **options):
        kept.append(os.dup(handle := opened(*arguments, **options)))
        return handle

    def refused(path):
        raise PermissionError(1, "not permitted", str(path))

    monkeypatch.setattr(os, "open", open_twice)
    monkeypatch.setattr(replacing.shutil, "rmtree", refused)
    yield
    for handle in kept:
        os.close(handle)


def test_what_could_not_be_removed_is_not_locked_by_a_child(tmp_path, forked):
    left = leftover(tmp_path)
    (found,) = replacing.leftovers(tmp_path / "out")
    with pytest.raises(PermissionError):
        replacing.remove(found)
    assert replacing.leftovers(tmp_path / "out") == [(left, False)]


def test_a_new_folder_that_could_not_be_removed_is_not_locked_by_a_child(tmp_path, forked):
    with pytest.raises(PermissionError), replacing.pending_folder(tmp_path / "out") as folder:
        pass
    assert replacing.leftovers(tmp_path / "out") == [(folder, False)]


def test_a_folder_that_had_made_way_is_named_and_kept(tmp_path, source):
    old = leftover(tmp_path, ".out.0123abcd.fp8core-old")
    with pytest.warns(RuntimeWarning, match=rf"{old} is .*out from before a killed run: rename it to restore it"):
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


def test_a_folder_that_had_to_make_way_comes_back_where_the_new_one_cannot_appear(tmp_path, source, monkeypatch):
    target = tmp_path / "out"
    quantize_checkpoint(source, target)
    rename = Path.rename

    def refusing(path, other):
        if path.name.endswith(".fp8core"):
            raise OSError(5, "Input/output error")
        return rename(path, other)

    monkeypatch.setattr(replacing, "exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(CheckpointError, match=r"Input/output error; .*out is as it was; nothing was left behind"):
        quantize_checkpoint(source, target, scheme="tensor", force=True)
    assert (scheme_in(target), left_in(tmp_path)) == ("channel", ["in", "out"])


@pytest.mark.parametrize(("given", "name"), [(".", "out"), ("model.safetensors", "out.safetensors")])
def test_what_another_run_took_for_a_leftover_is_not_written(tmp_path, source, monkeypatch, given, name):
    """Between its creation and its lock nothing tells a new file from a leftover."""
    lock = replacing.lock

    def too_late(handle):
        for left in tmp_path.glob(".out.*"):
            left.rmdir() if left.is_dir() else left.unlink()
        return lock(handle)

    monkeypatch.setattr(replacing, "lock", too_late)
    with pytest.raises(CheckpointError, match=r"another run removed .*\.fp8core when it was new; run again"):
        quantize_checkpoint(source / given, tmp_path / name)
    assert left_in(tmp_path) == ["in"]


def test_all_that_was_opened_is_closed(tmp_path, source):
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        leftover(tmp_path)
        with pytest.warns(RuntimeWarning, match="removed"):
            quantize_checkpoint(source, tmp_path / "out", force=True)
        quantize_checkpoint(source / "model.safetensors", tmp_path / "out.safetensors", force=True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


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
