"""The device module and the cache of compiled kernels, as far as they go without a GPU."""

import errno
import os
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8core.errors import BackendError, DeviceError
from fp8core.runtime import compiler, device, kernel_cache

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
    with pytest.warns(RuntimeWarning, match=f"{name} is damaged.*compiling it again") as warned:
        assert kernel_cache.fetch(name, compiler) == (KERNEL, False)
    assert len(warned) == 1
    assert kernel_cache.fetch(name, compiler) == (KERNEL, True)
    assert compiler.calls == 2


def test_a_kernel_that_is_whole_and_of_no_use_is_replaced(folder):
    name = kernel_cache.name_of("text")
    kernel_cache.fetch(name, Compiler(b"old"))
    with pytest.warns(RuntimeWarning, match="is of no use, no binary for this device: compiled again"):
        kernel_cache.replace(name, KERNEL, "no binary for this device")
    assert kernel_cache.fetch(name, Compiler()) == (KERNEL, True)


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    compiler = Compiler()
    with pytest.warns(RuntimeWarning) as warned:
        made_anew("text", "text", compiler=compiler)
    texts = [str(warning.message) for warning in warned]
    assert any("are not kept in" in text and str(tmp_path) in text and "Not a directory" in text for text in texts)
    assert len(texts) == len(set(texts))
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
@pytest.mark.parametrize("call", ["mkstemp", "replace"])
def test_a_read_only_or_full_disk_is_done_without(folder, monkeypatch, number, call):
    def fail(*args, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(
        *{"mkstemp": (kernel_cache.tempfile, "mkstemp"), "replace": (kernel_cache.os, "replace")}[call], fail
    )
    with pytest.warns(
        RuntimeWarning, match=f"not kept in {folder}: {os.strerror(number)}; set FP8CORE_CACHE_DIR"
    ) as warned:
        made_anew("text", "other")
    assert len(warned) == 1
    assert not list(folder.iterdir())


def test_a_kernel_that_cannot_be_read_is_made(folder):
    name = kernel_cache.name_of("text")
    (folder / name).mkdir(parents=True)
    with pytest.warns(RuntimeWarning) as warned:
        assert kernel_cache.fetch(name, Compiler()) == (KERNEL, False)
    assert any("are not read from" in str(warning.message) for warning in warned)


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


def test_what_the_compiler_raises_is_raised(folder):
    def fail():
        raise BackendError("no")

    with pytest.raises(BackendError, match="no"):
        kernel_cache.fetch(kernel_cache.name_of("text"), fail)
    assert not folder.exists()


# the device module


def test_count_and_its_reason_agree():
    assert device.count() >= 0
    assert (device.why_none() is None) == (device.count() > 0)


@pytest.mark.parametrize(("devices", "entered"), [(1, []), (2, [1])])
def test_calls_are_made_with_their_device_current(monkeypatch, devices, entered):
    seen = []

    @contextmanager
    def on(ordinal):
        seen.append(ordinal)
        yield

    monkeypatch.setattr(device, "count", lambda: devices)
    monkeypatch.setattr(device, "current_getter", lambda: lambda: 0)
    monkeypatch.setattr(device, "on", on)
    assert device.calling(0, lambda status: status)(7) == 7
    assert seen == []
    assert device.calling(1, lambda status: status)(8) == 8
    assert seen == entered


@pytest.mark.parametrize(("context", "bound", "status"), [(0, [1], 0), (0x7000, [], 201)])
def test_only_a_thread_without_a_context_gets_one_and_a_second_try(monkeypatch, context, bound, status):
    seen = []

    def current_context(where):
        where._obj.value = context
        return 0

    monkeypatch.setattr(device, "platform", lambda: "cuda")
    monkeypatch.setattr(device, "driver", lambda: SimpleNamespace(cuCtxGetCurrent=current_context))
    monkeypatch.setattr(device, "on", lambda ordinal: nullcontext())
    monkeypatch.setattr(device, "bind", seen.append)
    assert device.retry_with_context(201, 1, lambda *arguments: len(arguments)) == status
    assert seen == bound


def test_a_device_that_is_not_there_is_refused_with_the_reason():
    pytest.importorskip("cupy")
    wrong = device.count()
    with pytest.raises(DeviceError, match=f"device {wrong} cannot be used: there (is none|are {wrong} devices)"):
        device.target(wrong)
    with pytest.raises(DeviceError, match="device -1 cannot be used"):
        device.target(-1)


def test_without_cupy_there_is_no_device_and_a_reason():
    code = """
        import sys, types
        sys.modules["cupy"] = None
        from fp8core.runtime import device
        from fp8core.errors import DeviceError
        assert device.count() == 0
        assert "need CuPy" in device.why_none() and "cupy-cuda13x" in device.why_none()
        try:
            device.target(0)
        except DeviceError as error:
            assert "need CuPy" in str(error)
        else:
            raise SystemExit("not refused")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_border_imports_no_framework():
    code = """
        import sys
        import fp8core.interop, fp8core.runtime.device, fp8core.interop.float8, fp8core.runtime.kernel_cache
        loaded = {"cupy", "torch", "jax", "jaxlib"} & set(sys.modules)
        raise SystemExit(f"imported {loaded}" if loaded else 0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def nvrtc():
    pytest.importorskip("cupy")
    if device.platform() != "cuda":
        pytest.skip("the CUDA compiler is meant")
    try:
        device.cupy().cuda.nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"NVRTC: {error}")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120"])
def test_the_compiler_makes_code_without_a_device(arch):
    text = 'extern "C" __global__ void f(int* p) { *p = VALUE; }'
    code = compiler.compile_text(text, (f"-arch={arch}", "-std=c++17", "-DVALUE=3"))
    assert code.startswith(b"\x7fELF")
    assert b"f" in code


@pytest.mark.usefixtures("nvrtc")
def test_a_compile_error_holds_the_log_and_the_options():
    with pytest.raises(BackendError) as caught:
        compiler.compile_text('#line 7 "quantize.cu"\nint broken = missing;', ("-arch=sm_90a",), "quantize")
    text = str(caught.value)
    for part in (
        "refused quantize",
        "NVRTC_ERROR_COMPILATION",
        "-arch=sm_90a",
        "quantize.cu(7)",
        '"missing" is undefined',
    ):
        assert part in text, text


@pytest.mark.usefixtures("nvrtc")
def test_the_compilers_version_is_known():
    assert any(letter.isdigit() for letter in compiler.version())
