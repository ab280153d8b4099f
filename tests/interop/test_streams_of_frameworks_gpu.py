"""Streams of CuPy, torch and JAX: who waits for whom, and what outlives a call."""

import gc

import numpy as np
import pytest

import fp8core
from fp8core import interop
from fp8core.runtime import device
from fp8core.runtime.releases import releases
from support.gpu_arrays import (  # noqa: F401
    CYCLES,
    MAKERS,
    SECONDS,
    address,
    cupy,
    cupy_array,
    framework,
    jax,
    jax_array,
    slow,
    torch,
    torch_array,
)

pytestmark = pytest.mark.gpu


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


def test_results_for_the_default_stream_come_from_its_pool_while_another_is_current(torch):
    first = interop.view(torch_array((2, 2), "float32"), "x")
    with torch.cuda.stream(torch.cuda.Stream()):
        pointer = first.framework.empty((1 << 20,), "uint8", first.target, None, 0).pointer
    assert torch.empty(1 << 20, dtype=torch.uint8, device="cuda").data_ptr() == pointer


def test_operands_of_another_framework_are_waited_for(torch, cupy, slow):
    x = interop.view(torch_array((2, 2), "float32"), "x")
    weight = cupy.zeros(64, "uint8")
    cupy.cuda.Device().synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        slow((1,), (64,), (weight, np.int32(5), np.int64(CYCLES)))
        chosen = interop.stream_of(x)
        interop.order_before(chosen, (x, interop.view(weight, "weight")))
    copied = cupy.zeros(64, "uint8")
    copied.data.copy_from_device_async(weight.data, 64, device.cupy_stream(chosen))
    device.cupy_stream(chosen).synchronize()
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
        stream = interop.stream_of(seen)
        interop.order_before(stream, (seen, interop.view(weight, "weight")))
        result = seen.framework.empty((64,), "uint8", seen.target)
        cupy.cuda.runtime.memcpyAsync(result.pointer, seen.pointer, 64, cupy.cuda.runtime.memcpyDeviceToDevice, stream)
        given = seen.framework.wrap(result.array, stream)
    x.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert (given == 7).all()


def test_an_operand_that_only_dlpack_orders_makes_no_stream_wait_but_the_captured_one(torch, cupy):
    asked = []

    class Exporter:
        """An array of CuPy that offers only DLPack."""

        def __init__(self, array):
            self.array = array

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        def __dlpack__(self, *, stream=None, **options):
            asked.append(stream)
            return self.array.__dlpack__(stream=-1, **options)

    x = torch.ones((16, 64), device="cuda", dtype=torch.bfloat16)
    scale = Exporter(cupy.full(1, 0.5, "float32"))

    def call():
        return fp8core.quantize(x, scale=scale, group_shape=fp8core.PER_TENSOR).data

    call()  # compiles
    torch.cuda.synchronize()
    asked.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.cuda.current_stream().cuda_stream
        got = call()
    assert set(asked) == {captured}
    x.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert (got.float() == 6).all()
