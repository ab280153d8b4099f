"""Arrays, streams and dtypes that cannot be read: refused by the operand's name."""

import ctypes
import gc
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest

from fp8core import Float8Array, interop
from fp8core.dtypes import ITEMSIZE
from fp8core.errors import DeviceError, DTypeError, LayoutError
from fp8core.interop import dlpack
from support.host_arrays import MAKERS, Exporter, framework, jax_array, numpy_array, numpy_dtype, torch_array  # noqa: F401


def test_tensors_without_plain_memory_are_refused_by_name():
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3, 4)
    with warnings.catch_warnings(action="ignore"):
        nested = torch.nested.as_nested_tensor([torch.ones(3, 4)])
    for x, message in (
        (torch.ones(3, 4).to_sparse(), "weight needs a strided tensor with memory of its own, got torch.sparse_coo"),
        (nested, "with memory of its own, got a nested tensor$"),
        (fake, "weight needs memory of its own, got a FakeTensor"),
        (torch.complex(torch.ones(3, 4), torch.ones(3, 4)).conj().imag, "negative bit"),
    ):
        with warnings.catch_warnings(action="ignore"), pytest.raises(LayoutError, match=message):
            interop.view(x, "weight")
    with pytest.raises(LayoutError, match="codes needs memory of its own, got a FakeTensor"):
        Float8Array(fake.byte(), "float8_e4m3fn")
    with pytest.raises(DeviceError, match="weight needs memory of a CUDA or ROCm device or the CPU, got meta"):
        interop.view(torch.ones(3, 4, device="meta"), "weight")


@pytest.mark.parametrize(
    ("framework", "dtype"),
    [
        (framework, dtype)
        for framework in ("numpy", "torch")
        for dtype in ("float64", "int8", "uint64", "bool", "complex64")
    ]
    + [("jax", dtype) for dtype in ("int8", "uint32", "bool", "complex64")],
)
def test_other_dtypes_are_refused_by_name(framework, dtype):
    x = np.ones((2, 2), dtype)
    if framework == "torch":
        x = pytest.importorskip("torch").from_numpy(x)
    elif framework == "jax":
        x = pytest.importorskip("jax").numpy.asarray(x)
    with pytest.raises(DTypeError, match=f"scale needs an array of float8_e4m3fn.*{dtype}"):
        interop.view(x, "scale")


def test_odd_numpy_arrays_are_refused_by_name():
    other = ">f4" if np.little_endian else "<f4"
    table = np.zeros(4, np.dtype([("a", "u1"), ("b", "f4")]))
    for x, error, message in (
        (np.ones(3, other), DTypeError, "x needs the machine's byte order"),
        (np.array([None, "text"], object), DTypeError, "x needs an array of .*object"),
        (table, DTypeError, "x needs an array of .*'a'"),
        (table["b"], LayoutError, "x needs strides of whole elements of 4 bytes, got .5,. bytes"),
        (np.zeros(9, np.uint8)[1:].view(np.float32)[:2], LayoutError, "x needs elements at multiples of 4 bytes"),
        (np.ma.array([1.0, 2.0], np.float32, mask=[0, 1]), LayoutError, "x needs a plain array"),
    ):
        with pytest.raises(error, match=message):
            interop.view(x, "x")


@pytest.mark.parametrize("x", [1.5, [1.0, 2.0], None, "text", np.float32(1.0)])
def test_what_is_no_array_is_refused_by_name(x):
    with pytest.raises(DTypeError, match=r"input_scale needs an array( that offers DLPack)?, got "):
        interop.view(x, "input_scale")


def test_tracers_of_jax_are_refused():
    jax = pytest.importorskip("jax")

    @jax.jit
    def traced(x):
        interop.view(x, "x")
        return x

    with pytest.raises(LayoutError, match=r"x needs memory of its own, got a tracer.*jax\.jit"):
        traced(jax.numpy.ones(3))


def test_deleted_arrays_of_jax_are_refused():
    x = jax_array((2, 2), "float32")
    x.delete()
    with pytest.raises(LayoutError, match="x needs memory of its own, got one that was deleted"):
        interop.view(x, "x")


def test_an_exporter_on_another_kind_of_device_is_refused():
    class Metal(Exporter):
        def __dlpack_device__(self):
            return (8, 0)

    with pytest.raises(DeviceError, match="x needs memory of a CUDA or ROCm device or the CPU, got Metal 0"):
        interop.view(Metal(np.zeros(3, np.uint8), "uint8"), "x")


@pytest.mark.parametrize("method", ["__dlpack__", "__dlpack_device__"])
@pytest.mark.parametrize(
    "kind",
    [
        *(BufferError, RuntimeError, ValueError, TypeError, NotImplementedError),
        *(AttributeError, KeyError, IndexError, AssertionError, OSError, UserWarning),
    ],
)
def test_an_exporter_that_fails_is_named(kind, method, monkeypatch):
    def fail(self, **options):
        raise kind("nothing here")

    Broken = type("Broken", (Exporter,), {method: fail})
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    for call, words in (
        (interop.view, "an array"),
        (interop.check_writable, "a writable array"),
    ):
        with pytest.raises(
            LayoutError, match=f"x needs {words} that .*, got .*Broken: {kind.__name__}: .*nothing here"
        ) as caught:
            call(Broken(np.zeros(3, np.uint8), "uint8"), "x")
        assert type(caught.value.__cause__) is kind
        del caught
    gc.collect()
    assert not ignored


class Liar(Exporter):
    """An exporter of capsules that say something else."""

    def __init__(self, extent, **said):
        super().__init__(np.zeros(extent, np.uint8), "uint8")
        self.said = said

    def __dlpack__(self, **options):
        capsule = super().__dlpack__(**options)
        tensor = dlpack.managed(capsule).tensor
        for name, value in self.said.items():
            setattr(tensor, name, value)
        return capsule


def test_an_exporter_of_a_null_pointer_is_refused():
    with pytest.raises(LayoutError, match=r"x needs memory, got address 0 for shape \(3,\)"):
        interop.view(Liar(3, data=None), "x")
    assert interop.view(Liar(0, data=None), "x").shape == (0,)


def test_an_exporter_of_elements_at_odd_addresses_is_refused():
    with pytest.raises(LayoutError, match="x needs elements at multiples of 4 bytes"):
        interop.view(Exporter(np.zeros(9, np.uint8)[1:5].view(np.uint32), "float32"), "x")


NEGATIVE = (ctypes.c_int64 * 1)(-3)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"device_type": dlpack.CUDA}, "it reports CPU, but exports memory of CUDA"),
        ({"device_type": dlpack.ROCM}, "it reports CPU, but exports memory of ROCm"),
        ({"shape": None}, "a shape is needed, got none for 1 axes"),
        ({"ndim": -1}, "a shape is needed, got none for -1 axes"),
        ({"shape": NEGATIVE}, r"extents of at least 0 are needed, got shape \(-3,\)"),
    ],
    ids=["CUDA", "ROCm", "no shape", "no axes", "negative"],
)
def test_a_capsule_that_cannot_be_true_is_refused(said, message):
    with pytest.raises(
        LayoutError,
        match=f"x needs an array that exports itself by DLPack, got .*Liar: BufferError: {message}",
    ):
        interop.view(Liar(3, **said), "x")


def test_destinations_must_be_writable():
    x = numpy_array((2, 2), "float32")
    interop.check_writable(x, "out")
    x.flags.writeable = False
    assert interop.view(x, "out").pointer == x.ctypes.data
    with pytest.raises(LayoutError, match="out needs to be writable, got a read-only array"):
        interop.check_writable(x, "out")
    with pytest.raises(LayoutError, match="out needs to be writable, got a read-only Exporter"):
        interop.check_writable(Exporter(x.view(np.uint32), "float32"), "out")
    with pytest.raises(LayoutError, match="out needs to be writable, got an array of JAX"):
        interop.check_writable(jax_array((2, 2), "float32"), "out")
    interop.check_writable(torch_array((2, 2), "float32"), "out")


# streams


class WithProtocol:
    def __cuda_stream__(self):
        return (0, 7)


class WithPair:
    __cuda_stream__ = (0, 7)


class WithPointer:
    ptr = 8


class WithCudaStream:
    ptr = None
    cuda_stream = 9


def test_a_stream_is_an_address_or_offers_one(framework):
    seen = interop.view(MAKERS[framework]((2, 2), "float32"), "x")
    assert interop.stream_of(seen) == 0
    assert interop.stream_of(seen, 5) == 0
    address = interop.stream_address
    offers = WithProtocol(), WithPair(), WithPointer(), WithCudaStream()
    assert [address(s) for s in (0, 1, 5, *offers)] == [0, 0, 5, 7, 7, 8, 9]
    for wrong in (-1, 1 << 64, "0", 1.5, True, object(), np.arange(2), WithProtocol):
        with pytest.raises(DeviceError, match="stream needs an address"):
            address(wrong)


# dtypes


@pytest.mark.parametrize("name", ITEMSIZE)
def test_a_dtype_goes_by_many_names(name):
    dtype = numpy_dtype(name)
    spellings = [name, dtype, dtype.type]
    torch = pytest.importorskip("torch")
    spellings.append(getattr(torch, name))
    spellings += [getattr(pytest.importorskip("jax").numpy, name), jax_array(1, name).dtype]
    assert [interop.dtype_name(spelling) for spelling in spellings] == [name] * len(spellings)


@pytest.mark.parametrize(
    "dtype",
    [
        *("float8", "float64", float, np.float64, np.dtype(">f4"), None, 8, ml_dtypes.float8_e4m3, []),
        *(np.float32(1), np.ones(2, np.float32)),  # such as an array that was meant for out
    ],
    ids=str,
)
def test_other_dtypes_are_refused_with_the_list(dtype):
    with pytest.raises(DTypeError, match=r"dtype needs one of float8_e4m3fn, .*uint8.* got "):
        interop.dtype_name(dtype)


def test_other_dtypes_of_torch_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(DTypeError, match=r"got torch\.float64"):
        interop.dtype_name(torch.float64)
