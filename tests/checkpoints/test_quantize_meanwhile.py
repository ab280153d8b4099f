"""What comes to a target while a checkpoint is written: it is not replaced, whoever put it there."""

import os
import re
import shutil

import pytest

from fp8core.checkpoint import convert_checkpoint, quantize_checkpoint, verify_checkpoint
from fp8core.checkpoint.disk.files import read_header, read_rows
from fp8core.errors import CheckpointError
from support.checkpoint_folders import scheme_in, source  # noqa: F401
from support.checkpoints import fp8, left_in, shards, write


def once(act):
    """Return a callback for progress that does something the first time."""
    todo = [act]

    def progress(*_):
        while todo:
            todo.pop()()

    return progress


def granularities(target):
    """Return how a checkpoint is scaled, by its tensors and by its configuration."""
    found = verify_checkpoint(target)
    assert not found.faults
    return {layer.granularity for layer in found.checkpoint.layers.values()}


@pytest.mark.parametrize("form", ["folder", "file"])
def test_of_two_runs_that_began_at_once_the_first_to_end_wins(tmp_path, source, form, monkeypatch):
    """Neither saw the other when it began."""
    monkeypatch.setattr("fp8core.checkpoint.disk.running.clear_leftovers", lambda *_, **__: None)
    given, name = (source, "out") if form == "folder" else (source / "model.safetensors", "out.safetensors")
    target = tmp_path / name
    other = once(lambda: quantize_checkpoint(given, target, scheme="tensor"))
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(target))} exists: give another name, or force"):
        quantize_checkpoint(given, target, scheme="block", progress=other)
    assert granularities(target) == {"tensor"}
    other = once(lambda: quantize_checkpoint(given, target, scheme="channel", force=True))
    with pytest.raises(CheckpointError, match=rf"will not replace {re.escape(str(target))}: it appeared while"):
        quantize_checkpoint(given, target, scheme="block", force=True, progress=other)
    assert granularities(target) == {"channel"}
    assert left_in(tmp_path) == (["in", "out"] if form == "folder" else ["in", "out.config.json", "out.safetensors"])


def test_a_folder_and_a_file_of_one_name_do_not_hinder_each_other(tmp_path, source):
    """The file's configuration has the folder's name and a suffix."""
    folder = once(lambda: quantize_checkpoint(source, tmp_path / "out"))
    quantize_checkpoint(source / "model.safetensors", tmp_path / "out.safetensors", progress=folder)
    quantize_checkpoint(source, tmp_path / "out", force=True)
    (tmp_path / "out").rename(tmp_path / "other")
    quantize_checkpoint(source, tmp_path / "out")
    assert left_in(tmp_path) == ["in", "other", "out", "out.config.json", "out.safetensors"]


def test_a_file_without_a_configuration_does_not_replace_one_that_came_meanwhile(tmp_path, source):
    target = tmp_path / "out.safetensors"
    quantize_checkpoint(source, tmp_path / "fp8")
    came = once(lambda: target.write_bytes(b"precious"))
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(target))} exists: give another name, or force"):
        convert_checkpoint(tmp_path / "fp8" / "model.safetensors", target, to="bf16", progress=came)
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("form", ["folder", "file"])
def test_what_was_to_be_replaced_may_be_gone(tmp_path, source, form):
    given, name = (source, "out") if form == "folder" else (source / "model.safetensors", "out.safetensors")
    target = tmp_path / name
    quantize_checkpoint(given, target, scheme="tensor")
    gone = once(lambda: shutil.rmtree(target) if form == "folder" else target.unlink())
    quantize_checkpoint(given, target, scheme="channel", force=True, progress=gone)
    assert granularities(target) == {"channel"}
    assert left_in(tmp_path) == (["in", "out"] if form == "folder" else ["in", "out.config.json", "out.safetensors"])


def test_a_strangers_folder_that_came_meanwhile_stays(tmp_path, source):
    target = tmp_path / "out"

    def strangers():
        target.mkdir()
        (target / "thesis.txt").write_text("years of work")

    with pytest.raises(CheckpointError, match=r"will not replace .*fp8core did not write it"):
        quantize_checkpoint(source, target, force=True, progress=once(strangers))
    assert (target / "thesis.txt").read_text() == "years of work"
    assert left_in(tmp_path) == ["in", "out"]


def test_a_strangers_file_in_a_folder_that_is_replaced_stays(tmp_path, source):
    target, again = tmp_path / "out", tmp_path / "again"
    quantize_checkpoint(source, target)
    note = target / "note.txt"
    for run in (
        lambda progress: quantize_checkpoint(source, target, force=True, progress=progress),
        lambda progress: convert_checkpoint(again, target, to="bf16", force=True, progress=progress),
    ):
        if not again.exists():
            quantize_checkpoint(source, again)
        with pytest.raises(CheckpointError, match=r"holds note.txt, which fp8core did not write"):
            run(once(lambda: note.write_text("kept")))
        assert note.read_text() == "kept"
        assert scheme_in(target) == "channel"
        note.unlink()


@pytest.mark.parametrize("run", [quantize_checkpoint, verify_checkpoint])
def test_a_source_that_is_written_meanwhile_is_not_taken_for_what_it_was(tmp_path, run):
    source, out = shards(tmp_path / "in"), tmp_path / "out"
    second = source / "model-00002-of-00002.safetensors"
    if run is verify_checkpoint:
        quantize_checkpoint(source, out)
        second, source = out / second.name, out
    content = second.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")

    def rewritten():
        second.write_bytes(content[:begin] + bytes(len(content) - begin))
        os.utime(second, (1, 1))  # file systems may count time in milliseconds

    with pytest.raises(
        CheckpointError, match=rf"cannot read {re.escape(str(second))}: it was written since it was opened"
    ):
        run(source, *([] if run is verify_checkpoint else [out]), progress=once(rewritten))
    assert left_in(tmp_path) == (["in", "out"] if run is verify_checkpoint else ["in"])


def test_a_file_that_became_shorter_is_not_read_on(tmp_path):
    file = write(tmp_path / "model.safetensors", {"a.weight": fp8(64, 128)})
    (entry,) = read_header(file).entries.values()
    file.write_bytes(file.read_bytes()[:-1])
    with file.open("rb") as opened, pytest.raises(CheckpointError, match=r"ended inside a\.weight: it became shorter"):
        list(read_rows(opened, entry))
