"""Host arrays of each framework: NumPy, torch, JAX, and an array that supports only DLPack."""

import ml_dtypes
import numpy as np
import pytest

from fp8core import interop
from fp8core.dtypes import FORMATS, ITEMSIZE
from fp8core.target import HOST

EIGHT = (*FORMATS, "float8_e8m0fnu")


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def torch_array(shape, dtype):
    torch = pytest.importorskip("torch")
    return torch.ones(shape, dtype=torch.float32).to(getattr(torch, dtype))


def jax_array(shape, dtype):
    jax = pytest.importorskip("jax")
    with jax.enable_x64(dtype == "int64"):
        return jax.numpy.ones(shape, numpy_dtype(dtype))


def numpy_array(shape, dtype):
    return np.ones(shape, np.float32).astype(numpy_dtype(dtype))


def exporter(shape, dtype):
    return Exporter(numpy_array(shape, dtype).view(f"u{ITEMSIZE[dtype]}"), dtype)


class Exporter:
    """An array that supports only DLPack."""

    def __init__(self, array, dtype):
        self.array, self.dtype = array, dtype

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        from fp8core.interop import dlpack

        return dlpack.retag(self.array.__dlpack__(**options), self.dtype)


class OldExporter(Exporter):
    """An exporter from before DLPack 1.0."""

    def __dlpack__(self, *, stream=None):
        return super().__dlpack__(stream=stream)


MAKERS = {"numpy": numpy_array, "torch": torch_array, "jax": jax_array, "dlpack": exporter}
ADDRESS = {
    "numpy": lambda x: x.ctypes.data,
    "torch": lambda x: x.data_ptr(),
    "jax": lambda x: x.unsafe_buffer_pointer(),
    "dlpack": lambda x: x.array.ctypes.data,
}


@pytest.fixture(params=MAKERS)
def framework(request):
    return request.param


def codes(shape=(8, 16)):
    """Return bytes at an address whose alignment JAX accepts without a copy."""
    array = interop.view(np.zeros(1, np.uint8), "x").framework.empty(shape, "uint8", HOST).array
    array[...] = np.arange(array.size, dtype=np.uint8).reshape(shape)
    return array
