"""Kernels on a GPU: loaded from disk, compiled again, in new threads and new processes."""

import gc
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from fp8core.errors import BackendError
from fp8core.runtime import compiler, device, kernel_cache, launches
from support.gpu_arrays import cupy  # noqa: F401

pytestmark = pytest.mark.gpu


KERNEL = 'extern "C" __global__ void fill(unsigned char* p) { extern __shared__ char s[]; p[threadIdx.x] = VALUE; }'


@pytest.fixture
def options():
    target = device.target(device.current())
    if target.platform == "hip":
        return ("-std=c++17", f"--offload-arch=gfx{target.arch:x}")
    return ("-std=c++17", f"-arch=sm_{target.arch}")


def filled(function: compiler.Function, cupy) -> int:
    p = cupy.zeros(32, "uint8")
    argument = np.array([p.data.ptr], np.uint64)
    arguments = np.array([argument.ctypes.data], np.uint64)
    cupy.cuda.driver.launchKernel(function.address, 1, 1, 1, 32, 1, 1, 0, 0, arguments.ctypes.data, 0)
    return int(p.get().min())


def test_a_kernel_is_loaded_from_disk_without_a_compiler(cupy, options, tmp_path, monkeypatch):
    """By loaders of the test's own: the process's modules stay as they are."""
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path))
    defined = (*options, "-DVALUE=41")
    module = compiler.Modules().load(KERNEL, defined, "from_disk")
    function = compiler.function(module, "fill", 100 * 1024 if device.target(device.current()).arch >= 80 else 0)
    del module
    gc.collect()
    assert filled(function, cupy) == 41
    monkeypatch.setattr(compiler, "compile_text", lambda *_: pytest.fail("compiled"))
    again = compiler.function(compiler.Modules().load(KERNEL, defined, "from_disk"), "fill")
    assert again.module is not function.module
    assert filled(again, cupy) == 41


def test_a_kernel_that_the_driver_refuses_is_compiled_again(cupy, options, tmp_path, monkeypatch):
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path))
    defined = (*options, "-DVALUE=42")
    compiler.Modules().load(KERNEL, defined, "refused")
    (kept,) = tmp_path.iterdir()
    kernel_cache.keep(kept.name, b"\x7fELF and nothing of use")
    with pytest.warns(RuntimeWarning, match="cannot be used, the driver cannot load refused"):
        module = compiler.Modules().load(KERNEL, defined, "refused")
    assert filled(compiler.function(module, "fill"), cupy) == 42


def test_launches_outlive_the_loader_of_their_module(cupy, options, tmp_path, monkeypatch):
    """A bound launch keeps its launcher, and that its module, though nothing else does."""
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path))
    target = device.target(device.current())
    loader = compiler.Modules()
    function = compiler.function(loader.load(KERNEL, (*options, "-DVALUE=44"), "kept"), "fill")
    bound = launches.Launcher(target, function, "fill", ["P"], (32, 1, 1), 0, b"").bind((1, 1, 1))
    del loader, function
    gc.collect()
    p = cupy.zeros(32, "uint8")
    bound(cupy.cuda.get_current_stream().ptr, p.data.ptr)
    assert (p.get() == 44).all()


def test_errors_have_their_names(options):
    name = {"cuda": "CUDA_ERROR_INVALID_VALUE", "hip": "hipErrorInvalidValue"}[device.platform()]
    with pytest.raises(BackendError, match=rf"cuSomething failed with {name} \(1\) for a problem"):
        device.check(1, "cuSomething", "a problem")
    device.check(0, "cuSomething")
    module = compiler.load('extern "C" __global__ void f() {}', options, "names")
    with pytest.raises(BackendError, match="kernel missing with 0 bytes"):
        compiler.function(module, "missing")


def test_a_new_thread_gets_a_context():
    import threading

    failures: list[BaseException] = []

    def work() -> None:
        try:
            device.make_current(0)
            assert device.current() == 0
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures


def test_a_cached_kernel_needs_no_compiler_in_a_fresh_process(options, tmp_path):
    code = f"""
        from fp8core.runtime import compiler
        module = compiler.load({KERNEL!r}, {(*options, "-DVALUE=43")!r}, "fresh")
        compiler.function(module, "fill")
        maps = open("/proc/self/maps").read()
        print("compiler" if "libnvrtc" in maps or "libhiprtc" in maps else "none")
    """
    environment = {**os.environ, "FP8CORE_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    ]
    assert said == ["compiler", "none"]
