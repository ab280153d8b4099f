"""On a GPU: arrays by ``__cuda_array_interface__`` (numba, PyCUDA) and views of cuda.core."""

import textwrap

import numpy as np
import pytest

import fp8core
from fp8core import Float8Array, interop
from fp8core.errors import LayoutError
from fp8core.runtime import device
from support.gpu_arrays import cupy  # noqa: F401

pytestmark = pytest.mark.gpu

SLOW = 'extern "C" __global__ void slow(float* p, float value, long long cycles)' + textwrap.dedent("""
    {
        long long start = clock64();
        while (clock64() - start < cycles) {}
        p[threadIdx.x] = value;
    }
""")
CYCLES = 200_000_000
"""About a tenth of a second."""


class OfNumba:
    """A CuPy array that offers the interface and nothing else, with the stream that its producer works on."""

    def __init__(self, array, stream=None):
        self.array, self.stream = array, stream

    @property
    def __cuda_array_interface__(self):
        return dict(self.array.__cuda_array_interface__, stream=self.stream)


def values(cupy, *shape):
    return cupy.random.default_rng(0).standard_normal(shape, dtype="float32")


def same(left, right):
    return bool((left.view("uint8") == right.view("uint8")).all())


def test_products_of_such_arrays_have_the_bits_of_cupys(cupy):
    x, weight = values(cupy, 16, 256), values(cupy, 128, 256)
    q = fp8core.quantize(weight)
    codes = OfNumba(q.data.codes)
    wanted = fp8core.linear(x, q)
    for number in range(3):  # none of these calls is recognized by an earlier one
        given = fp8core.quantize(OfNumba(weight, None if number else device.stream() or 1))
        assert same(given.data.codes, q.data.codes)
        got = fp8core.linear(OfNumba(x), Float8Array(codes, "float8_e4m3fn"), OfNumba(q.scale))
        assert isinstance(got, cupy.ndarray)
        assert same(got, wanted)
    assert Float8Array(codes, "float8_e4m3fn").codes.data.ptr == q.data.codes.data.ptr


def test_results_are_written_where_they_are_wanted(cupy):
    q = fp8core.quantize(values(cupy, 16, 256))
    out = cupy.full((16, 256), cupy.nan, "float32")
    fp8core.dequantize(q, out=OfNumba(out), dtype="float32")
    assert same(out, fp8core.dequantize(q, dtype="float32"))


def test_the_stream_that_an_array_names_is_waited_for_and_waits(cupy):
    slow = cupy.RawKernel(SLOW, "slow")
    side, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros((1, 64), "float32")
    slow((1,), (64,), (x, np.float32(1), np.int64(1)))
    fp8core.quantize(x)
    cupy.cuda.runtime.deviceSynchronize()
    for stream in (None, other):
        with side:
            slow((1,), (64,), (x, np.float32(3), np.int64(CYCLES)))
        got = fp8core.quantize(OfNumba(x, side.ptr), scale=1.0, stream=stream)
        with side:  # it waits for what reads x
            x.fill(100)
        cupy.cuda.runtime.deviceSynchronize()
        assert (got.data == 3.0).all()


def test_views_of_cuda_core_are_read_without_a_copy(cupy):
    utils = pytest.importorskip("cuda.core.utils", exc_type=ImportError)
    x = values(cupy, 16, 256)
    given = utils.StridedMemoryView.from_any_interface(x, stream_ptr=-1)
    assert interop.view(given, "x").pointer == x.data.ptr
    for _ in range(2):
        got = fp8core.quantize(given)
        assert isinstance(got.data, Float8Array)
        assert same(got.data.codes, fp8core.quantize(x).data.codes)
    out = cupy.full((16, 256), cupy.nan, "float32")
    fp8core.dequantize(got, out=utils.StridedMemoryView.from_any_interface(out, stream_ptr=-1), dtype="float32")
    assert same(out, fp8core.dequantize(got, dtype="float32"))


def test_arrays_of_numba(cupy):
    cuda = pytest.importorskip("numba.cuda", exc_type=ImportError)
    x = values(cupy, 16, 256)
    there = cuda.to_device(x.get())
    assert same(fp8core.quantize(there).data.codes, fp8core.quantize(x).data.codes)


def test_values_of_fp8_are_compared_on_the_gpu(cupy):
    q = Float8Array(cupy.arange(256, dtype="uint8").reshape(16, 16), "float8_e4m3fn")
    host = q.get().astype(np.float32)
    assert ((q == q).get() == (host == host)).all()
    assert ((q == q.T).get() == (host == host.T)).all()
    assert ((q != 1.5).get() == (host != 1.5)).all()
    assert (q == 1e9).get().sum() == 0
    np.testing.assert_array_equal(q.tolist(), host)
    assert q.item(3, -1) == host[3, -1]
    assert q.copy().codes.data.ptr != q.codes.data.ptr
    assert "\n" not in repr(q)
    with pytest.raises(TypeError, match=r"call \.get\(\)"):
        np.asarray(q)


def test_a_read_only_array_is_no_destination(cupy):
    class ReadOnly(OfNumba):
        @property
        def __cuda_array_interface__(self):
            return dict(super().__cuda_array_interface__, data=(self.array.data.ptr, True))

    q = fp8core.quantize(values(cupy, 16, 256))
    with pytest.raises(LayoutError, match="out needs to be writable, got a read-only ReadOnly"):
        fp8core.dequantize(q, out=ReadOnly(cupy.empty((16, 256), "float32")), dtype="float32")
