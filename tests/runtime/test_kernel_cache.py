"""The cache of compiled kernels on disk: what is kept, what is made anew, and what a killed process leaves."""

import errno
import os
import pwd
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fp8core.errors import BackendError
from fp8core.runtime import kernel_cache

KERNEL = b"\x7fELF and some more"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / "kernels"
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(place))
    return place


class Compiler:
    """Counts how often it had to work."""

    def __init__(self, kernel: bytes = KERNEL) -> None:
        self.kernel = kernel
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.kernel


def made_anew(*texts: str, compiler: Compiler | None = None) -> None:
    for text in texts:
        assert kernel_cache.fetch(kernel_cache.name_of(text), compiler or Compiler()) == (KERNEL, False)


def test_a_kernel_is_made_once_and_then_read(folder):
    compiler = Compiler()
    name = kernel_cache.name_of("text", "options")
    assert kernel_cache.fetch(name, compiler) == (KERNEL, False)
    assert kernel_cache.fetch(name, compiler) == (KERNEL, True)
    assert compiler.calls == 1
    assert [path.name for path in folder.iterdir()] == [name]


def test_the_name_says_what_a_kernel_was_made_from():
    parts = [("a", "b"), ("ab", ""), ("", "ab"), ("ab",), ("a", "b", ""), ("b", "a")]
    assert len({kernel_cache.name_of(*part) for part in parts}) == len(parts)
    assert kernel_cache.name_of("a", "b") == kernel_cache.name_of("a", "b")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes([data[0] ^ 1]) + data[1:],
    ],
)
def test_a_damaged_kernel_is_made_again_and_replaced(folder, damage):
    compiler = Compiler()
    name = kernel_cache.name_of("text")
    kernel_cache.fetch(name, compiler)
    path = folder / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(RuntimeWarning, match=f"{name} is not used, it is damaged.*compiling it again") as warned:
        assert kernel_cache.fetch(name, compiler) == (KERNEL, False)
    assert len(warned) == 1
    assert kernel_cache.fetch(name, compiler) == (KERNEL, True)
    assert compiler.calls == 2


def test_where_warnings_are_errors_only_the_first_call_fails(folder):
    name = kernel_cache.name_of("text")
    kernel_cache.keep(name, KERNEL)
    (folder / name).write_bytes(b"damaged")
    with warnings.catch_warnings(action="error"):
        with pytest.raises(RuntimeWarning, match="it is damaged"):
            kernel_cache.fetch(name, Compiler())
        assert kernel_cache.fetch(name, Compiler()) == (KERNEL, False)
        assert kernel_cache.fetch(name, Compiler()) == (KERNEL, True)


def test_every_bit_of_a_file_counts(folder):
    name = kernel_cache.name_of("text")
    kernel_cache.keep(name, KERNEL)
    path = folder / name
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with warnings.catch_warnings(action="ignore"):
            assert kernel_cache.fetch(name, Compiler()) == (KERNEL, False)
        assert path.read_bytes() == whole


def test_a_kernel_of_another_name_is_made_again(folder):
    """Two kernels have the same entry and other constants: one that was loaded for the other would run."""
    names = kernel_cache.name_of("text", "-DFP8_K=1"), kernel_cache.name_of("text", "-DFP8_K=2")
    for name in names:
        kernel_cache.keep(name, name.encode())
    (folder / names[0]).replace(folder / names[1])
    with pytest.warns(RuntimeWarning, match=f"{names[1]} is not used, it is damaged"):
        assert kernel_cache.fetch(names[1], Compiler()) == (KERNEL, False)


def test_a_kernel_that_is_whole_and_of_no_use_is_replaced(folder):
    name = kernel_cache.name_of("text")
    kernel_cache.fetch(name, Compiler(b"old"))
    with pytest.warns(RuntimeWarning, match="cannot be used, no binary for this device: compiled again"):
        kernel_cache.replace(name, KERNEL, "no binary for this device")
    assert kernel_cache.fetch(name, Compiler()) == (KERNEL, True)


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    compiler = Compiler()
    with pytest.warns(RuntimeWarning) as warned:
        made_anew("text", "text", compiler=compiler)
    assert len(warned) == 1
    for part in ("neither read from", str(tmp_path), "Not a directory", "set FP8CORE_CACHE_DIR"):
        assert part in str(warned[0].message)
    assert compiler.calls == 2


def test_a_folder_that_cannot_be_written_is_done_without(folder):
    folder.mkdir()
    folder.chmod(0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write anywhere")
    with pytest.warns(RuntimeWarning, match="are not kept in .*Permission denied; set FP8CORE_CACHE_DIR") as warned:
        made_anew("text", "text")
    assert len(warned) == 1


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "replace"])
def test_a_read_only_or_full_disk_is_done_without(folder, monkeypatch, number, call):
    real = getattr(os, call)

    def fail(*args, **options):
        if call == "open" and not args[1] & os.O_CREAT:
            return real(*args, **options)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.warns(
        RuntimeWarning, match=f"not kept in {folder}: {os.strerror(number)}; set FP8CORE_CACHE_DIR"
    ) as warned:
        made_anew("text", "other")
    assert len(warned) == 1
    assert not list(folder.iterdir())


def test_readers_and_writers_at_once_see_whole_kernels(folder):
    kernels = {kernel_cache.name_of(str(i)): bytes([i]) * 100_000 for i in range(4)}

    def work(i: int) -> bool:
        name = list(kernels)[i % 4]
        if i % 3 == 0:
            kernel_cache.keep(name, kernels[name])
        return kernel_cache.fetch(name, lambda: kernels[name])[0] == kernels[name]

    with warnings.catch_warnings(action="error"), ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))
    assert {path.name for path in folder.iterdir()} == set(kernels)


def test_the_folder_is_the_users_unless_chosen(monkeypatch):
    monkeypatch.delenv("FP8CORE_CACHE_DIR", raising=False)
    assert kernel_cache.folder().parts[-2:] == ("fp8core", "kernels")
    monkeypatch.setenv("FP8CORE_CACHE_DIR", "elsewhere")
    assert kernel_cache.folder() == Path("elsewhere")


@pytest.mark.parametrize("user", ["", "root"])
def test_a_tilde_in_the_variable_is_the_home_folder(user, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FP8CORE_CACHE_DIR", f"~{user}/kernels")
    home = Path(pwd.getpwnam(user).pw_dir) if user else tmp_path
    assert kernel_cache.folder() == home / "kernels"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FP8CORE_CACHE_DIR", "~no such user/kernels")
    assert "there is no such user" in kernel_cache.refusal()
    assert "there is no such user" in kernel_cache.refusal_to_write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "tilde"])
def test_without_a_home_folder_there_is_one_warning_and_no_folder(raises, monkeypatch, tmp_path):
    """Releases of platformdirs differ in what they do for a user without a home folder."""

    def found(*_, **__):
        if raises:
            raise RuntimeError("could not determine the home directory")
        return Path("~/.cache/fp8core")

    monkeypatch.delenv("FP8CORE_CACHE_DIR", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", found)
    monkeypatch.chdir(tmp_path)
    kernel_cache._WARNED.clear()
    with pytest.warns(RuntimeWarning, match=r"neither read from ~/\.cache/fp8core/kernels .*HOME is not set") as told:
        made_anew("text")
    assert len(told) == 1
    assert "HOME is not set" in kernel_cache.refusal()
    assert not list(tmp_path.iterdir())


def test_what_the_compiler_raises_is_raised(folder):
    def fail():
        raise BackendError("no")

    with pytest.raises(BackendError, match="no"):
        kernel_cache.fetch(kernel_cache.name_of("text"), fail)
    assert not folder.exists()


KILLED = """
import os, signal, sys
from fp8core.runtime import kernel_cache
name, hook = sys.argv[1:]

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def half(path, flags, *args, before=os.open, **options):
    descriptor = before(path, flags, *args, **options)
    if flags & os.O_CREAT:
        os.write(descriptor, b"fp8core")
        die()
    return descriptor

def renamed(*args, before=os.replace, **options):
    before(*args, **options)
    die()

setattr(os, *{"writing": ("open", half), "renaming": ("replace", die), "renamed": ("replace", renamed)}[hook])
kernel_cache.keep(name, b"the new kernel")
"""


def killed(name: str, hook: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, name, hook], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def age(path: Path, seconds: int) -> None:
    status = path.stat()
    os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))


@pytest.mark.parametrize("hook", ["writing", "renaming"])
@pytest.mark.parametrize("before", [True, False])
def test_a_killed_writer_leaves_the_old_kernel_and_what_it_began_is_removed(folder, hook, before):
    name = kernel_cache.name_of("text")
    if before:
        kernel_cache.keep(name, KERNEL)
    killed(name, hook)
    (left,) = folder.glob("new-*")
    with warnings.catch_warnings(action="error"):
        assert kernel_cache.fetch(name, Compiler()) == (KERNEL, before)
        kernel_cache.keep("other", KERNEL)
        assert left.exists(), "its writer may be at work"
        for old in (left, folder / name):
            age(old, kernel_cache.UNFINISHED_SECONDS + 60)
        kernel_cache.keep("other", KERNEL)
    assert {path.name for path in folder.iterdir()} == {name, "other"}
    assert kernel_cache.fetch(name, Compiler()) == (KERNEL, True)


def test_no_folder_stays_open(folder):
    name = kernel_cache.name_of("text")
    kernel_cache.keep(name, KERNEL)
    opened = set(Path("/proc/self/fd").iterdir())
    kernel_cache.keep(name, KERNEL)
    assert kernel_cache.has(name)
    assert kernel_cache.refusal() is None
    assert set(Path("/proc/self/fd").iterdir()) == opened


def test_a_killed_writer_that_had_renamed_leaves_the_new_kernel(folder):
    name = kernel_cache.name_of("text")
    kernel_cache.keep(name, b"old")
    killed(name, "renamed")
    assert kernel_cache.fetch(name, Compiler()) == (b"the new kernel", True)
    assert [path.name for path in folder.iterdir()] == [name]
