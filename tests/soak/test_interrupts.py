"""Ctrl-C at any moment while a file is written: Python delivers it when a function begins, or when one in C has returned.

Files are the old ones or the new ones, nothing is left beside them, and no lock is held.
"""

import errno
import os
import sys

import pytest

from fp8core.runtime import kernel_cache, locks
from fp8core.tuning import files, save_tunings, timed
from support.blaslt_fixtures import built  # noqa: F401
from support.tuning_stub import PROBLEM, stub  # noqa: F401
from support.tunings import SECOND

MOST = 2000
"""The moments of one call, at most."""


def interrupted(call, at, modules):
    """Make a call, interrupted at a moment of functions of modules; return whether it was."""
    of, left = {module.__file__ for module in modules}, [at]

    def profile(frame, event, _):
        if event in ("call", "c_return") and frame.f_code.co_filename in of:
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return left[0] < 0  # an interrupt in a destructor is only reported


def at_every_moment(before, call, modules):
    """Yield after a call was interrupted, at each of its moments in turn, and after one that was not."""
    for at in range(MOST):
        before()
        was = interrupted(call, at, modules)
        yield at
        if not was:
            return
    raise AssertionError(f"more than {MOST} moments")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from an iterator that is dropped open
def test_a_kernel_is_kept_or_not(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_cache.FOLDER_VARIABLE, str(tmp_path))
    name, found = kernel_cache.name_of("text"), set()
    for at in at_every_moment(
        lambda: kernel_cache.keep(name, b"old"), lambda: kernel_cache.keep(name, b"new"), [kernel_cache]
    ):
        kernel, from_disk = kernel_cache.fetch(name, bytes)
        assert from_disk
        assert [one.name for one in tmp_path.iterdir()] == [name], f"left at {at}"
        found.add(kernel)
    assert found == {b"old", b"new"}


def test_tunings_are_saved_or_not(stub, tmp_path):
    path, found = tmp_path / "x", set()
    one, other = timed(PROBLEM, SECOND), timed(PROBLEM._replace(m=100), SECOND)

    def before():
        path.unlink(missing_ok=True)
        save_tunings(path, [one])

    for at in at_every_moment(before, lambda: save_tunings(path, [other]), [files, locks]):
        found.add(len(files._read(path).tunings))
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x", "x.lock"], f"left at {at}"
        handle = os.open(tmp_path / "x.lock", os.O_RDWR)
        assert locks.try_lock(handle), f"locked at {at}"
        os.close(handle)
    assert found == {1, 2}


@pytest.mark.parametrize("saves", [True, False], ids=["tunings", "kernel"])
def test_an_interrupt_is_none_the_less_if_what_was_written_cannot_be_removed(stub, tmp_path, monkeypatch, saves):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    def stale(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setenv(kernel_cache.FOLDER_VARIABLE, str(tmp_path))
    with monkeypatch.context() as failing:
        failing.setattr("os.replace", interrupt)
        failing.setattr("os.unlink", stale)
        with pytest.raises(KeyboardInterrupt):
            if saves:
                save_tunings(tmp_path / "x", [timed(PROBLEM, SECOND)])
            else:
                kernel_cache.keep(kernel_cache.name_of("text"), b"new")
