"""GPU arrays of each framework, and a kernel that keeps a stream busy."""

import textwrap

import pytest

from fp8core.interop.float8 import DTYPES, Float8Array
from fp8core.runtime import device
from support.host_arrays import numpy_dtype

SLOW = 'extern "C" __global__ void slow(unsigned char* p, int value, long long cycles)' + textwrap.dedent("""
    {
        long long start = clock64();
        while (clock64() - start < cycles) {}
        p[threadIdx.x] = value;
    }
""")
SECONDS = 60.0
"""A timeout that every stream here meets."""
CYCLES = 200_000_000
"""About a tenth of a second, in clock cycles."""


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
