"""Checkpoints on file systems that cannot do what others can, and sources that are no files."""

import errno
import fcntl
import os
import re
import stat
from types import SimpleNamespace

import pytest

from fp8core.checkpoint import open_checkpoint, plan_checkpoint, quantize_checkpoint
from fp8core.checkpoint.disk import replacing
from fp8core.errors import CheckpointError
from support.checkpoint_folders import scheme_in, source  # noqa: F401
from support.checkpoints import left_in


def refusing(call, number, where=lambda *_: True):
    """Return a system call that says ``number`` where it is asked for something."""

    def refused(*arguments):
        if where(*arguments):
            raise OSError(number, os.strerror(number))
        return call(*arguments)

    return refused


def is_folder(handle):
    return stat.S_ISDIR(os.fstat(handle).st_mode)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_systems_without_locks_and_that_sync_no_folders_are_written_to(tmp_path, source, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", refusing(fcntl.flock, number))
    monkeypatch.setattr(os, "fsync", refusing(os.fsync, number, is_folder))
    for _ in range(2):
        quantize_checkpoint(source, tmp_path / "out", force=True)
        quantize_checkpoint(source / "model.safetensors", tmp_path / "out.safetensors", force=True)
    assert left_in(tmp_path) == ["in", "out", "out.config.json", "out.safetensors"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_systems_that_cannot_exchange_names_are_written_to(tmp_path, source, monkeypatch, number):
    asked = []
    system = SimpleNamespace(renameat2=lambda *arguments: asked.append(arguments) or -1)
    without = SimpleNamespace(CDLL=lambda *_, **__: system, get_errno=lambda: number)
    monkeypatch.setattr(replacing, "ctypes", without)
    for scheme in ("channel", "tensor"):
        quantize_checkpoint(source, tmp_path / "out", scheme=scheme, force=True)
    assert asked
    assert (scheme_in(tmp_path / "out"), left_in(tmp_path)) == ("tensor", ["in", "out"])


def test_a_folder_that_cannot_be_synced_for_another_reason_is_told(tmp_path, source, monkeypatch):
    monkeypatch.setattr(os, "fsync", refusing(os.fsync, errno.EIO, is_folder))
    with pytest.raises(CheckpointError, match="Input/output error"):
        quantize_checkpoint(source, tmp_path / "out")


def test_all_files_and_the_folders_of_their_names_are_on_the_disk_in_the_end(tmp_path, source, monkeypatch):
    synced, fsync = set(), os.fsync

    def noted(handle):
        synced.add((os.fstat(handle).st_dev, os.fstat(handle).st_ino))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    quantize_checkpoint(source, tmp_path / "out")
    quantize_checkpoint(source / "model.safetensors", tmp_path / "out.safetensors")
    written = [tmp_path, *tmp_path.glob("out*"), *(tmp_path / "out").iterdir()]
    assert len(written) == 8
    assert {(one.stat().st_dev, one.stat().st_ino) for one in written} == synced


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a FIFO"), (os.mkdir, "a directory")])
def test_a_weight_file_that_is_no_regular_file_is_refused_at_once(tmp_path, source, make, kind):
    (source / "model.safetensors").unlink()
    make(source / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"cannot read .*model\.safetensors: it is {kind}"):
        quantize_checkpoint(source, tmp_path / "out")


def test_a_source_that_is_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot read .*in\.safetensors: it is a FIFO"):
        quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "hf_quant_config.json"])
def test_a_fifo_in_the_place_of_a_json_file_is_refused_at_once(tmp_path, source, name):
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    with pytest.raises(CheckpointError, match=rf"cannot read .*{re.escape(name)}: it is a FIFO"):
        open_checkpoint(source)


def test_other_files_that_have_no_end_are_left_out_and_named(tmp_path, source):
    (source / "deep").mkdir()
    os.mkfifo(source / "deep" / "pipe")
    (source / "zeros").symlink_to("/dev/zero")
    (source / "notes").symlink_to(tmp_path / "notes")
    (tmp_path / "notes").write_text("of the user")
    left = {one.name: one.reason for one in plan_checkpoint(source).extras if not one.copied}
    assert left == {"deep/pipe": "not a regular file", "zeros": "not a regular file"}
    quantize_checkpoint(source, tmp_path / "out")
    assert (tmp_path / "out" / "notes").read_text() == "of the user"
    assert not (tmp_path / "out" / "zeros").exists()
