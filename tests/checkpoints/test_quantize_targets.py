"""Where a checkpoint may be written, and what --force replaces."""

import os
from pathlib import Path

import pytest

from fp8core.checkpoint import convert_checkpoint, plan_checkpoint, quantize_checkpoint
from fp8core.checkpoint.disk import replacing, writing
from fp8core.errors import CheckpointError
from support.checkpoint_folders import scheme_in, source  # noqa: F401
from support.checkpoints import left_in, model, normal, read, write


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


def test_a_file_without_a_configuration_takes_that_of_the_one_that_it_replaces_away(tmp_path):
    write(tmp_path / "in.safetensors", {"up.weight": normal(64, 32)})
    fp8, other = tmp_path / "fp8.safetensors", tmp_path / "other.safetensors"
    for target in (fp8, other):
        quantize_checkpoint(tmp_path / "in.safetensors", target)
        assert target.with_suffix(".config.json").exists()
    convert_checkpoint(fp8, other, to="bf16", force=True)
    assert not other.with_suffix(".config.json").exists()


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


def test_a_current_folder_that_has_been_removed_is_no_hindrance(tmp_path, source, monkeypatch):
    quantize_checkpoint(source, tmp_path / "out")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    quantize_checkpoint(source, tmp_path / "out", scheme="tensor", force=True)
    assert scheme_in(tmp_path / "out") == "tensor"


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


@pytest.mark.parametrize("unwritable", [".", "out", "out/below"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work_and_by_a_plan(
    tmp_path, source, monkeypatch, unwritable
):
    quantize_checkpoint(source, tmp_path / "out")
    (tmp_path / "out" / "below").mkdir()
    access = os.access

    def denied(path, mode, **options):  # and not by chmod: root writes wherever it likes
        return Path(path) != tmp_path / unwritable and access(path, mode, **options)

    monkeypatch.setattr(os, "access", denied)
    folder = tmp_path / unwritable
    for call in (plan_checkpoint, quantize_checkpoint):
        with pytest.raises(CheckpointError, match=rf"cannot write .*out: the folder {folder} cannot be written"):
            call(source, tmp_path / "out", scheme="tensor", force=True)
    assert (scheme_in(tmp_path / "out"), left_in(tmp_path)) == ("channel", ["in", "out"])


def test_a_folder_that_cannot_be_listed_is_refused_before_the_work_and_by_a_plan(tmp_path, source, monkeypatch):
    listed = Path.iterdir

    def denied(path):
        if path == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", denied)
    for call in (plan_checkpoint, quantize_checkpoint):
        with pytest.raises(CheckpointError, match=r"cannot write .*out: Permission denied"):
            call(source, tmp_path / "out")


def test_a_configuration_beside_the_target_that_is_no_file_is_not_replaced(tmp_path, source):
    (tmp_path / "out.config.json").mkdir()
    with pytest.raises(CheckpointError, match="not a plain file"):
        quantize_checkpoint(source / "model.safetensors", tmp_path / "out.safetensors", force=True)
