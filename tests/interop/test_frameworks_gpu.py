"""Array interop on a GPU: pointers, streams, devices, and what outlives a call, for CuPy, PyTorch and JAX."""

import gc
import os
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core import interop
from fp8core.errors import BackendError, LayoutError
from fp8core.interop.float8 import DTYPES, Float8Array
from fp8core.problem import ITEMSIZE
from fp8core.runtime import compiler, device, jit, kernel_cache
from fp8core.runtime.releases import releases

pytestmark = pytest.mark.gpu

SLOW = 'extern "C" __global__ void slow(unsigned char* p, int value, long long cycles)' + textwrap.dedent("""
    {
        long long start = clock64();
        while (clock64() - start < cycles) {}
        p[threadIdx.x] = value;
    }
""")
SECONDS = 60.0
"""Enough for any stream here to pass."""
CYCLES = 200_000_000
"""About a tenth of a second."""


@pytest.fixture
def cupy():
    return device.cupy()


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no GPU")
    return torch


@pytest.fixture
def jax():
    jax = pytest.importorskip("jax")
    if not any(there.platform == "gpu" for there in jax.local_devices()):
        pytest.skip("this JAX has no GPU")
    return jax


@pytest.fixture
def slow(cupy):
    return cupy.RawKernel(SLOW, "slow")


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def cupy_array(shape, dtype):
    cupy = device.cupy()
    if dtype in DTYPES:
        return Float8Array(cupy.zeros(shape, "uint8"), dtype)
    return cupy.zeros(shape, numpy_dtype(dtype))


def torch_array(shape, dtype):
    torch = pytest.importorskip("torch")
    return torch.zeros(shape, dtype=torch.uint8, device="cuda").to(getattr(torch, dtype))


def jax_array(shape, dtype):
    jax = pytest.importorskip("jax")
    return jax.numpy.zeros(shape, numpy_dtype(dtype), device=jax.local_devices(backend="gpu")[0])


MAKERS = {"cupy": cupy_array, "torch": torch_array, "jax": jax_array}


def address(x) -> int:
    if isinstance(x, Float8Array):
        return x.codes.data.ptr
    if hasattr(x, "data_ptr"):
        return x.data_ptr()
    return x.unsafe_buffer_pointer() if hasattr(x, "unsafe_buffer_pointer") else x.data.ptr


@pytest.fixture(params=MAKERS)
def framework(request):
    if request.param != "cupy":
        request.getfixturevalue(request.param)
    return request.param


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_an_array_is_seen_as_it_is(framework, dtype):
    x = MAKERS[framework]((3, 5), dtype)
    seen = interop.view(x, "x")
    assert seen[:5] == (address(x), dtype, (3, 5), (5, 1), device.target(device.current()))
    assert seen.owner is x
    assert seen.framework.name == framework


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("shape", [(), (0, 5), (7,), (2, 3, 4)])
def test_a_result_is_the_memory_that_was_allocated(framework, dtype, shape):
    first = interop.view(MAKERS[framework]((2, 2), "float32"), "x")
    result = first.framework.empty(shape, dtype, first.target)
    given = first.framework.wrap(result.array, interop.stream_of(first))
    seen = interop.view(given, "result")
    assert (seen.dtype, seen.shape, seen.target) == (dtype, shape, first.target)
    assert seen.framework.name == framework
    assert 0 in shape or seen.pointer == result.pointer
    if framework == "cupy" and dtype in DTYPES:
        assert isinstance(given, Float8Array)


def test_a_result_can_have_strides(framework):
    first = interop.view(MAKERS[framework]((2, 2), "float32"), "x")
    result = first.framework.empty((6, 4), "float32", first.target, (1, 6))
    seen = interop.view(first.framework.wrap(result.array), "result")
    assert (seen.pointer, seen.shape, seen.strides) == (result.pointer, (6, 4), (1, 6))


@pytest.mark.parametrize("strides", [None, (1, 16)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_maker_gives_other_memory_of_the_same_form_each_time(framework, dtype, strides, cupy):
    first = interop.view(MAKERS[framework]((2, 2), "float32"), "x")
    new = first.framework.allocator((16, 32), dtype, first.target, strides)
    side = cupy.cuda.Stream(non_blocking=True)
    results = [new(stream) for stream in (None, None, side.ptr)]
    views = [interop.view(first.framework.wrap(array, side.ptr), "result") for _, array in results]
    assert {view[1:5] for view in views} == {(dtype, (16, 32), strides or (32, 1), first.target)}
    assert [view.pointer for view in views] == [pointer for pointer, _ in results]
    assert len({pointer for pointer, _ in results}) == 3


def test_scratch_lies_at_multiples_of_256_bytes(framework):
    first = interop.view(MAKERS[framework]((2, 2), "float32"), "x")
    results = [first.framework.scratch(nbytes, first.target) for nbytes in (0, 1, 1000, 1 << 20)]
    assert all(result.pointer % 256 == 0 for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_arrays_are_taken_over_without_a_copy(cupy, torch, jax, dtype):
    codes = cupy.arange(128, dtype="uint8").reshape(8, 16)
    q = Float8Array(codes, dtype)
    tensor = torch.from_dlpack(q)
    assert (tensor.dtype, tensor.data_ptr()) == (getattr(torch, dtype), codes.data.ptr)
    assert (tensor.view(torch.uint8).cpu().numpy() == codes.get()).all()
    taken = jax.dlpack.from_dlpack(q)
    assert (str(taken.dtype), taken.unsafe_buffer_pointer()) == (dtype, codes.data.ptr)
    assert (np.asarray(taken).view(np.uint8) == codes.get()).all()
    assert (q.get().view(np.uint8) == codes.get()).all()
    assert torch.from_dlpack(q[2:4]).data_ptr() == codes.data.ptr + 32
    assert torch.from_dlpack(q.T).stride() == (1, 16)


def test_tensors_that_require_grad_are_read(torch):
    x = torch.nn.Parameter(torch.ones(3, 4, device="cuda"))
    seen = interop.view(x, "x")
    assert seen.pointer == x.data_ptr()
    assert not seen.framework.wrap(seen.framework.empty((2,), "float8_e4m3fn", seen.target).array).requires_grad


def test_pinned_tensors_are_on_the_host(torch):
    assert interop.view(torch.ones(3).pin_memory(), "x").target.platform == "host"


def test_arrays_of_jax_cannot_be_destinations(jax):
    with pytest.raises(LayoutError, match="out needs to be writable"):
        interop.view(jax_array((2, 2), "float32"), "out", written=True)


# streams


def test_the_producers_stream_is_found(torch, cupy):
    x = torch_array((2, 2), "float32")
    seen = interop.view(x, "x")
    assert interop.stream_of(seen) == torch.cuda.current_stream().cuda_stream
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert interop.stream_of(seen) == side.cuda_stream
    y = interop.view(cupy_array((2, 2), "float32"), "y")
    with cupy.cuda.Stream(non_blocking=True) as other:
        assert interop.stream_of(y) == other.ptr
        assert interop.stream_of(seen, other) == other.ptr
    for given in (side, side.cuda_stream):
        assert interop.stream_of(y, given) == side.cuda_stream
    assert interop.stream_of(y, cupy.cuda.Stream.null) == 0


def test_results_come_from_the_pool_of_the_stream_that_writes_them(framework, cupy):
    first = interop.view(MAKERS[framework]((2, 2), "float32"), "x")
    side = cupy.cuda.Stream(non_blocking=True)
    result = first.framework.empty((1 << 20,), "uint8", first.target, None, side.ptr)
    assert interop.stream_of(first) != side.ptr
    pointer = result.pointer
    del result
    again = first.framework.empty((1 << 20,), "uint8", first.target, None, side.ptr)
    other = first.framework.empty((1 << 20,), "uint8", first.target)
    if framework != "jax":  # whose memory waits for JAX first
        assert again.pointer == pointer
    assert other.pointer != again.pointer


def test_operands_of_another_framework_are_waited_for(torch, cupy, slow):
    x = interop.view(torch_array((2, 2), "float32"), "x")
    weight = cupy.zeros(64, "uint8")
    cupy.cuda.Device().synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        slow((1,), (64,), (weight, np.int32(5), np.int64(CYCLES)))
        chosen = interop.stream_of(x, None, interop.view(weight, "weight"))
    copied = cupy.zeros(64, "uint8")
    copied.data.copy_from_device_async(weight.data, 64, device.external(chosen))
    device.external(chosen).synchronize()
    assert (copied.get() == 5).all()


def test_a_repeated_call_waits_for_another_framework(torch, cupy, slow):
    x, scale = torch.ones(1, 64, device="cuda"), cupy.ones(1, "float32")
    side = cupy.cuda.Stream(non_blocking=True)
    for _ in range(3):
        scale.fill(1)
        cupy.cuda.Device().synchronize()
        with side:
            slow((1,), (4,), (scale, np.int32(0x3F), np.int64(CYCLES)))  # the number of these four bytes is 0.747
            data, _ = fp8core.quantize(x, group_shape=fp8core.PER_TENSOR, scale=scale)
        assert (data.float() == 1.375).all()


def test_jax_reads_a_result_after_it_was_written(jax, cupy, slow):
    first = interop.view(jax_array((2, 2), "float32"), "x")
    side = cupy.cuda.Stream(non_blocking=True)
    stream = interop.stream_of(first, side)
    result = first.framework.empty((64,), "uint8", first.target, None, stream)
    with side:
        slow((1,), (64,), (np.uint64(result.pointer), np.int32(9), np.int64(CYCLES)))
    given = first.framework.wrap(result.array, stream)
    assert (np.asarray(given + 1) == 10).all()


def test_a_view_of_jax_waits_for_the_array(jax, cupy):
    side = cupy.cuda.Stream(non_blocking=True)
    copied = cupy.zeros(64, "uint8")
    cupy.cuda.Device().synchronize()
    x = jax_array((4096, 4096), "float32") + 1
    for _ in range(5):
        x = x @ (x / 4096)
    seen = interop.view(x, "x")
    stream = interop.stream_of(seen, side)
    with side:
        cupy.cuda.runtime.memcpyAsync(copied.data.ptr, seen.pointer, 64, cupy.cuda.runtime.memcpyDeviceToDevice, stream)
    side.synchronize()
    assert (copied.get().view(np.float32) == np.asarray(x).ravel()[:16]).all()


def test_memory_of_jax_is_kept_while_a_stream_reads_it(jax, cupy, slow):
    side = cupy.cuda.Stream(non_blocking=True)
    scratch = cupy.zeros(64, "uint8")
    cupy.cuda.Device().synchronize()
    assert releases().wait(SECONDS)
    seen = interop.view(jax_array((64,), "uint8"), "x")
    interop.stream_of(seen, side)
    with side:
        slow((1,), (64,), (scratch, np.int32(1), np.int64(CYCLES)))
    del seen
    assert not releases().wait(0)
    side.synchronize()
    assert releases().wait(SECONDS)


def test_the_operand_of_the_last_call_can_be_donated_once_its_stream_has_passed(jax, cupy):
    x = jax_array((64, 1024), "bfloat16") + 1
    data, _scale = fp8core.quantize(x)
    jax.block_until_ready(data)
    cupy.cuda.Device().synchronize()
    assert releases().wait(SECONDS)
    address = x.unsafe_buffer_pointer()
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert x.is_deleted()
    assert y.unsafe_buffer_pointer() == address
    assert (np.asarray(y).astype(np.float32) == 2).all()


def test_memory_given_to_jax_returns_when_jax_is_done(jax, cupy):
    first = interop.view(jax_array((2, 2), "float32"), "x")
    for _ in range(50):
        result = first.framework.empty((1 << 20,), "uint8", first.target)
        cupy.cuda.runtime.memset(result.pointer, 3, 1 << 20)
        given = first.framework.wrap(result.array, interop.stream_of(first))
        total = given.astype("int32").sum()
        del given, result
        gc.collect()
        assert int(total) == 3 << 20
    jax.block_until_ready(jax_array((4,), "float32") + 1)
    pool = cupy.get_default_memory_pool()
    result = first.framework.empty((512 << 20,), "uint8", first.target)
    given = first.framework.wrap(result.array, interop.stream_of(first))
    used = pool.used_bytes()
    del given, result
    gc.collect()
    assert any(releases().wait(SECONDS) and pool.used_bytes() <= used - (512 << 20) for _ in range(10_000))


def test_a_stream_under_capture_neither_waits_nor_breaks(torch, cupy):
    x = torch_array((64,), "uint8")
    weight = cupy.zeros(64, "uint8")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen = interop.view(x, "x")
        stream = interop.stream_of(seen, None, interop.view(weight, "weight"))
        result = seen.framework.empty((64,), "uint8", seen.target)
        cupy.cuda.runtime.memcpyAsync(result.pointer, seen.pointer, 64, cupy.cuda.runtime.memcpyDeviceToDevice, stream)
        given = seen.framework.wrap(result.array, stream)
    x.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert (given == 7).all()


@pytest.mark.multigpu
def test_another_than_the_current_device(framework, cupy):
    with cupy.cuda.Device(1):
        if framework == "torch":
            x = MAKERS["torch"]((2, 2), "float32").to("cuda:1")
        elif framework == "jax":
            import jax

            x = jax.device_put(MAKERS["jax"]((2, 2), "float32"), jax.local_devices(backend="gpu")[1])
        else:
            x = MAKERS["cupy"]((2, 2), "float32")
    with cupy.cuda.Device(0):
        seen = interop.view(x, "x")
        assert seen.target.device == 1
        given = seen.framework.wrap(
            seen.framework.empty((4, 4), "float8_e4m3fn", seen.target).array, interop.stream_of(seen)
        )
        assert interop.view(given, "result").target.device == 1
        assert device.current() == 0
    del x, seen, given
    cupy.cuda.Device(0).use()  # JAX leaves the device that it freed memory of current


# the device


def test_the_target_is_the_devices(cupy):
    target = device.target(device.current())
    properties = cupy.cuda.runtime.getDeviceProperties(device.current())
    assert target.multiprocessors == properties["multiProcessorCount"]
    assert target.warp == properties["warpSize"]
    if target.platform == "cuda":
        assert target.arch == properties["major"] * 10 + properties["minor"]
        assert target.shared_bytes == properties["sharedMemPerBlockOptin"]


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
    with pytest.warns(RuntimeWarning, match="is of no use, the driver cannot load refused"):
        module = compiler.Modules().load(KERNEL, defined, "refused")
    assert filled(compiler.function(module, "fill"), cupy) == 42


def test_launches_outlive_the_loader_of_their_module(cupy, options, tmp_path, monkeypatch):
    """A bound launch keeps its launcher, and that its module, though nothing else does."""
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path))
    target = device.target(device.current())
    loader = compiler.Modules()
    function = compiler.function(loader.load(KERNEL, (*options, "-DVALUE=44"), "kept"), "fill")
    bound = jit.Launcher(target, function, "fill", ["P"], (32, 1, 1), 0, b"").bind((1, 1, 1))
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
            device.bind(0)
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
