"""Quantization on a stream that has 16 multiprocessors of a device: eagerly, and captured into a graph."""

import ctypes
from contextlib import contextmanager

import numpy as np
import pytest

import fp8core
from fp8core import PER_TENSOR
from fp8core.problem import GroupShape
from fp8core.runtime import device, partitions
from support import reference
from support.engines import CupyEngine, assert_same_bytes, fresh

pytestmark = pytest.mark.gpu
SMS, RESOURCE_BYTES = 16, 256
SM_RESOURCE, DEFAULT_STREAM, NON_BLOCKING = 1, 1, 1


@contextmanager
def green_stream(multiprocessors):
    """Yield the address of a stream of a green context with so many multiprocessors of device 0."""
    driver = device.driver()
    if device.platform() != "cuda" or not hasattr(driver, "cuGreenCtxStreamCreate"):
        pytest.skip("green contexts need CUDA 12.5 or later")

    def call(name, *arguments):
        device.check(getattr(driver, name)(*arguments), name)

    device.make_current(0)
    handle, whole, some = ctypes.c_int(), *(ctypes.create_string_buffer(RESOURCE_BYTES) for _ in range(2))
    rest, groups = ctypes.create_string_buffer(RESOURCE_BYTES), ctypes.c_uint(1)
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(handle), 0)
    call("cuDeviceGetDevResource", handle, ctypes.byref(whole), SM_RESOURCE)
    call(
        *("cuDevSmResourceSplitByCount", ctypes.byref(some), ctypes.byref(groups), ctypes.byref(whole)),
        *(ctypes.byref(rest), 0, multiprocessors),
    )
    call("cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(some), 1)
    call("cuGreenCtxCreate", ctypes.byref(context), description, handle, DEFAULT_STREAM)
    try:
        call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, NON_BLOCKING, 0)
        try:
            yield stream.value
        finally:
            call("cuStreamSynchronize", stream)
            call("cuStreamDestroy_v2", stream)
    finally:
        call("cuGreenCtxDestroy", context)


@pytest.fixture
def engine():
    return CupyEngine()


@pytest.mark.parametrize("shape", [(4, 64), (60, 1024), (1000, 4096), (3000, 8192)], ids=str)
def test_per_tensor_quantization_runs_on_few_multiprocessors(engine, shape):
    x = fresh(shape)
    want = reference.quantize(x, group_shape=(-1, -1))
    there = engine.array(x)
    data, scale = fp8core.quantize(there, group_shape=PER_TENSOR)
    engine.cupy.cuda.Device(0).synchronize()
    with green_stream(SMS) as stream:
        assert partitions.multiprocessors(stream) == SMS
        for _ in range(3):
            data.codes[...] = 0xA5
            scale[...] = np.nan
            engine.cupy.cuda.Device(0).synchronize()
            fp8core.quantize(there, group_shape=PER_TENSOR, out=(data, scale), stream=stream)
            device.check(device.driver().cuStreamSynchronize(ctypes.c_void_p(stream)), "cuStreamSynchronize")
            assert_same_bytes(engine.codes(data), want.codes)
            assert_same_bytes(engine.numpy(scale).reshape(1, 1), want.scale)


@pytest.mark.parametrize("group_shape", [PER_TENSOR, GroupShape(1, 128)], ids=str)
def test_a_graph_captured_from_few_multiprocessors_holds_a_quantization(engine, group_shape):
    first, second = fresh((1000, 4096)), fresh((1000, 4096), spread=2)
    there = engine.array(first)
    out = fp8core.quantize(there, group_shape=group_shape)  # compiled before the capture
    engine.cupy.cuda.Device(0).synchronize()
    with green_stream(SMS) as address:
        fp8core.quantize(there, group_shape=group_shape, out=tuple(out), stream=address)
        stream = engine.cupy.cuda.ExternalStream(address)
        stream.synchronize()
        stream.begin_capture()
        fp8core.quantize(there, group_shape=group_shape, out=tuple(out), stream=address)
        graph = stream.end_capture()
        for x in (first, second):
            there[...] = engine.array(x)
            out.data.codes[...] = 0xA5
            engine.cupy.cuda.Device(0).synchronize()
            graph.launch(stream)
            stream.synchronize()
            want = reference.quantize(x, group_shape=tuple(group_shape))
            assert_same_bytes(engine.codes(out.data), want.codes)
            assert_same_bytes(engine.numpy(out.scale).reshape(want.scale.shape), want.scale)
