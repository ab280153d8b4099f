"""Whom the cache of compiled kernels believes: files of this user or root in a folder that nobody else can write."""

import os
import socket
import stat
import subprocess
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fp8core.errors import BackendError
from fp8core.runtime import kernel_cache

KERNEL = b"\x7fELF and some more"
FORGED = b"\x7fELF of somebody else"
NAME = kernel_cache.name_of("text")
OTHER_USER = 54321

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in which lies a whole kernel that must not be taken once something is wrong with the place."""
    place = tmp_path / "above" / "kernels"
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(place))
    kernel_cache.keep(NAME, FORGED)
    assert kernel_cache.fetch(NAME, bytes) == (FORGED, True)
    return place


def snapshot(folder):
    """Return what is in a folder: names, kinds, owners and contents."""
    return {
        path.name: (path.lstat().st_mode, path.lstat().st_uid, path.is_file() and path.read_bytes())
        for path in sorted(folder.iterdir())
    }


def fetched_with_one_warning(*parts):
    """Fetch twice: both times the kernel is compiled, and there is one warning, with the parts."""
    with pytest.warns(RuntimeWarning) as warned:
        fetched = [kernel_cache.fetch(NAME, lambda: KERNEL) for _ in range(2)]
    assert fetched == [(KERNEL, False)] * 2
    assert len(warned) == 1
    for part in map(str, parts):
        assert part in str(warned[0].message)


# the folder


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o1777, 0o775, 0o702], ids=oct)
def test_a_folder_that_others_can_write_is_not_used(folder, mode):
    folder.chmod(mode)
    before = snapshot(folder)
    fetched_with_one_warning(
        folder, "can be written by others", f"mode {mode:04o}", "set FP8CORE_CACHE_DIR to another folder"
    )
    assert snapshot(folder) == before, "nothing is written to a folder of others"
    assert "can be written by others" in kernel_cache.refusal()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707], ids=oct)
def test_a_folder_that_others_can_exchange_is_not_used(folder, mode):
    folder.parent.chmod(mode)
    fetched_with_one_warning(folder.parent, "can be written by others", f"mode {mode:04o}")


def test_a_sticky_folder_above_is_no_reason(folder):
    folder.parent.chmod(0o1777)
    with warnings.catch_warnings(action="error"):
        assert kernel_cache.fetch(NAME, bytes) == (FORGED, True)
    assert kernel_cache.refusal() is None


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o711, 0o500], ids=oct)
def test_what_others_can_only_read_is_used(folder, mode):
    folder.chmod(mode)
    with warnings.catch_warnings(action="error"):
        assert kernel_cache.fetch(NAME, bytes) == (FORGED, True)
    assert kernel_cache.refusal() is None


@root
@pytest.mark.parametrize("above", [False, True])
def test_a_folder_of_another_user_is_not_used(folder, above):
    foreign = folder.parent if above else folder
    os.chown(foreign, OTHER_USER, -1)
    before = snapshot(folder)
    fetched_with_one_warning(foreign, f"belongs to user {OTHER_USER}")
    assert snapshot(folder) == before


@root
def test_roots_folder_is_used_by_all(folder, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    with warnings.catch_warnings(action="error"):
        assert kernel_cache.fetch(NAME, bytes) == (FORGED, True)


def test_a_link_to_a_folder_counts_as_the_folder(folder, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(folder)
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(link))
    with warnings.catch_warnings(action="error"):
        assert kernel_cache.fetch(NAME, bytes) == (FORGED, True)
    folder.chmod(0o777)
    fetched_with_one_warning(folder, link, "can be written by others")


def test_a_link_to_a_folder_that_others_can_exchange_is_not_used(folder, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(folder)
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(link))
    folder.parent.chmod(0o777)
    fetched_with_one_warning(folder.parent, "can be written by others")


def test_a_link_that_leads_nowhere_makes_the_folder_where_it_points(folder, tmp_path, monkeypatch):
    link, there = tmp_path / "link", tmp_path / "not" / "yet"
    link.symlink_to(there)
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(link))
    assert kernel_cache.fetch(NAME, lambda: KERNEL) == (KERNEL, False)
    assert (there / NAME).is_file()


def test_links_in_a_circle_are_a_warning(tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(link)
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(link))
    fetched_with_one_warning(link)


@pytest.mark.parametrize("mask", [0, 0o002, 0o077], ids=oct)
def test_what_is_made_is_this_users_alone(tmp_path, monkeypatch, mask):
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path / "a" / "b"))
    before = os.umask(mask)
    try:
        kernel_cache.keep(NAME, KERNEL)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / path).stat().st_mode) for path in ("a", "a/b", f"a/b/{NAME}")]
    assert modes == [0o700, 0o700, 0o600]
    with warnings.catch_warnings(action="error"):
        assert kernel_cache.fetch(NAME, bytes) == (KERNEL, True)


@root
def test_others_use_what_root_has_made_once_they_may_read_it(monkeypatch):
    with TemporaryDirectory() as above:
        monkeypatch.setenv("FP8CORE_CACHE_DIR", f"{above}/kernels")
        kernel_cache.keep(NAME, KERNEL)
        assert not has_as_another_user()
        subprocess.run(["chmod", "-R", "a+rX", above], check=True)  # docs/how-to/compile-ahead.md
        assert has_as_another_user()


def has_as_another_user():
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(OTHER_USER)
        os.setuid(OTHER_USER)
        with warnings.catch_warnings(action="ignore"):
            os._exit(0 if kernel_cache.has(NAME) else 1)
    return os.waitpid(child, 0)[1] == 0


def test_writing_is_tried_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path / "a"))
    assert kernel_cache.refusal_to_write() is None
    assert not list((tmp_path / "a").iterdir())
    (tmp_path / "a").chmod(0o777)
    assert "can be written by others" in kernel_cache.refusal_to_write()
    with pytest.raises(BackendError, match=rf"cannot be kept in {tmp_path}/a: .* can be written by others"):
        kernel_cache.store(NAME, KERNEL)


def test_a_folder_that_is_not_there_is_not_made_by_asking(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path / "a"))
    assert kernel_cache.refusal() is None
    assert not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_made_is_refused_where_its_link_leads(tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir()
    (tmp_path / "link").symlink_to(place / "cache" / "kernels")
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path / "link"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != place)
    assert kernel_cache.refusal() == f"it cannot be made, as {place} cannot be written"
    assert not list(place.iterdir())


# the file


def linked(path):
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def fifo(path):
    path.unlink()
    os.mkfifo(path, 0o600)


def bound_socket(path):
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket holds 100 bytes
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind("s")
    finally:
        os.chdir(here)
    path.with_name("s").rename(path)


def too_large(path):
    with path.open("ab") as file:
        file.truncate(kernel_cache.LARGEST + 1)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def open_to_others(path):
    path.chmod(0o602)


def open_to_the_group(path):
    path.chmod(0o660)


def of_another_user(path):
    os.chown(path, OTHER_USER, -1)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (linked, "it is a symbolic link"),
        (fifo, "it is a FIFO"),
        (bound_socket, "No such device or address"),
        (too_large, f"it is too large ({kernel_cache.LARGEST + 1} bytes)"),
        (truncated, "it is damaged"),
        (open_to_others, "it can be written by others (mode 0602)"),
        (open_to_the_group, "it can be written by others (mode 0660)"),
        pytest.param(of_another_user, f"it belongs to user {OTHER_USER}", marks=root),
    ],
)
def test_a_file_that_is_not_to_be_trusted_is_replaced(folder, spoil, reason):
    spoil(folder / NAME)
    elsewhere = folder / "elsewhere"
    with pytest.warns(RuntimeWarning) as warned:
        assert kernel_cache.fetch(NAME, lambda: KERNEL) == (KERNEL, False)
    assert len(warned) == 1
    for part in (f"the compiled kernel {folder / NAME} is not used", reason, "compiling it again"):
        assert part in str(warned[0].message)
    with warnings.catch_warnings(action="error"):
        assert kernel_cache.fetch(NAME, bytes) == (KERNEL, True)
    assert not elsewhere.exists() or FORGED in elsewhere.read_bytes(), "a link's target is left alone"


def test_a_directory_in_the_place_of_a_file_stays(folder):
    (folder / NAME).unlink()
    (folder / NAME).mkdir()
    fetched_with_one_warning(folder / NAME, "it is a directory")
    assert (folder / NAME).is_dir()
    assert not list(folder.glob("new-*"))
