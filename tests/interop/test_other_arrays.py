"""Arrays by ``__cuda_array_interface__`` (numba, PyCUDA) and views of cuda.core, without a GPU: memory of the host."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

import fp8core
from fp8core import Float8Array, interop
from fp8core.errors import DeviceError, DTypeError, LayoutError
from fp8core.interop import cuda_array, cupy_arrays, dlpack_capsule
from fp8core.runtime import device, streams
from support.targets import AMPERE

TARGET = AMPERE
CURRENT, OWN = 0x100, 0x200


class OfNumba:
    """An array that offers the interface and nothing else."""

    def __init__(self, array, stream=None, read_only=False, **fields):
        self.array = array
        offered = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, read_only),
            "version": 3,
            "strides": None if array.flags.c_contiguous else array.strides,
            "stream": stream,
            **fields,
        }
        self.offered = {name: field for name, field in offered.items() if field != "left out"}

    @property
    def __cuda_array_interface__(self):
        return self.offered


@pytest.fixture
def log(monkeypatch):
    """Return which stream waited for which; those from 0xC00 on are captured."""
    done = []
    monkeypatch.setattr(streams, "join", lambda waiting, awaited, ordinal: done.append((waiting, "after", awaited)))
    monkeypatch.setattr(streams, "event_query", lambda stream, ordinal: lambda: True)
    monkeypatch.setattr(cuda_array, "ordinal_of", lambda pointer: TARGET.device)
    monkeypatch.setattr(device, "target", lambda ordinal: TARGET._replace(device=ordinal))
    monkeypatch.setattr(device, "current", lambda: TARGET.device + 1)
    monkeypatch.setattr(device, "stream", lambda ordinal=-1: CURRENT)
    monkeypatch.setattr(device, "current_stream", lambda ordinal=-1: SimpleNamespace(ptr=CURRENT))
    monkeypatch.setattr(device, "capturing", lambda stream: stream >= 0xC00)
    kept = SimpleNamespace(start=lambda: None, add=lambda owner, *_: done.append(("kept", type(owner).__name__)))
    monkeypatch.setattr(dlpack_capsule, "releases", lambda: kept)
    return done


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int32", "int64"])
@pytest.mark.parametrize("cut", [np.s_[:], np.s_[1:, 2:], np.s_[::2]])
def test_an_array_is_seen_as_it_is(log, dtype, cut):
    array = np.zeros((4, 6), dtype)[cut]
    x = OfNumba(array)
    seen = interop.view(x, "x")
    steps = tuple(step // array.itemsize for step in array.strides)
    assert seen[:5] == (array.ctypes.data, dtype, array.shape, steps, TARGET)
    assert (seen.framework.name, seen.owner) == ("cuda_array_interface", x)


def test_an_array_without_elements_has_no_address_and_is_on_the_current_device(log):
    seen = interop.view(OfNumba(np.zeros((0, 5), np.float32), data=(None, False)), "x")
    assert seen[:3] == (0, "float32", (0, 5))
    assert seen.target.device == TARGET.device + 1


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"typestr": "<f8"}, DTypeError, "x needs an array of .*got <f8"),
        ({"typestr": ">f4"}, DTypeError, "got >f4"),
        ({"mask": [True] * 24}, LayoutError, "x needs a plain array, got a masked one"),
        ({"strides": (26, 4)}, LayoutError, "x needs strides of whole elements of 4 bytes"),
        ({"strides": (4,)}, LayoutError, r"x needs a stride for each of 2 axes, got \(4,\)"),
        ({"strides": 4}, LayoutError, "x needs an array with __cuda_array_interface__, got .*OfNumba: TypeError"),
        ({"data": (0x1002, False)}, LayoutError, "x needs elements at multiples of 4 bytes, got address 0x1002"),
        ({"data": (0, False)}, LayoutError, r"x needs memory, got address 0 for shape \(4, 6\)"),
        ({"stream": 0}, LayoutError, "x needs a stream that __cuda_array_interface__ has a number for, got 0"),
        ({"data": "left out"}, LayoutError, "x needs an array with __cuda_array_interface__, got .*OfNumba: KeyError"),
        ({"data": ()}, LayoutError, "x needs an array with __cuda_array_interface__, got .*OfNumba: IndexError"),
        *(
            (fields, LayoutError, f"x needs an array with __cuda_array_interface__, got .*OfNumba: {kind}")
            for fields, kind in (
                ({"strides": "ab"}, "TypeError"),
                ({"strides": (24.0, 4.0)}, "TypeError"),
                ({"shape": ("4", "6")}, "TypeError"),
                ({"shape": (-4, 6)}, r"BufferError: extents of at least 0 are needed, got shape \(-4, 6\)"),
                ({"data": ("0x1000", False)}, "TypeError"),
                ({"stream": 1.0}, "TypeError"),
            )
        ),
    ],
)
def test_what_kernels_cannot_read_is_refused(log, fields, error, words):
    with pytest.raises(error, match=words):
        interop.view(OfNumba(np.zeros((4, 6), np.float32), **fields), "x")


class Memory(SimpleNamespace):
    """Stands for CuPy's UnownedMemory, whose size cannot be negative."""

    def __init__(self, ptr, size, owner, device_id):
        assert size >= 0
        owner.memory = self
        super().__init__(bytes=(ctypes.c_char * size).from_address(ptr), owner=owner, device_id=device_id)


@pytest.mark.parametrize("cut", [np.s_[:], np.s_[::-1], np.s_[1:, ::-2], np.s_[:, ::-1], np.s_[:0]])
def test_codes_of_any_order_become_an_array_of_cupy(log, monkeypatch, cut):
    cuda = SimpleNamespace(UnownedMemory=Memory, MemoryPointer=lambda memory, offset: (memory.bytes, offset))
    fake = SimpleNamespace(cuda=cuda, ndarray=lambda shape, dtype, at, steps: np.ndarray(shape, dtype, *at, steps))
    monkeypatch.setattr(device, "cupy", lambda: fake)
    codes = np.arange(24, dtype=np.uint8).reshape(4, 6)[cut]
    x = OfNumba(codes, stream=OWN)
    q = Float8Array(x, "float8_e4m3fn")
    np.testing.assert_array_equal(q.codes, codes)
    assert log[0] == (CURRENT, "after", OWN)
    assert (x.memory.owner, x.memory.device_id) == (x, TARGET.device)


def test_a_read_only_array_is_no_destination(log):
    x = OfNumba(np.zeros((4, 6), np.float32), read_only=True)
    interop.view(x, "x")
    with pytest.raises(LayoutError, match="out needs to be writable, got a read-only OfNumba"):
        interop.check_writable(x, "out")
    with pytest.raises(LayoutError, match="residual needs to be writable"):
        interop.check_writable(x, "residual")


@pytest.mark.parametrize(("stream", "own"), [(None, CURRENT), ("left out", CURRENT), (1, 1), (2, 2), (OWN, OWN)])
def test_the_stream_that_an_array_names_waits_and_is_waited_for(log, stream, own):
    x = OfNumba(np.zeros((4, 6), np.float32), stream=stream)
    seen = [interop.view(x, "x")]
    work = interop.stream_of(seen[0])
    assert work == CURRENT
    assert log == [(CURRENT, "after", own)]
    log.clear()
    interop.order_after(work, seen)
    assert log == [(own, "after", CURRENT)]
    log.clear()
    seen.clear()
    assert log == [("kept", "OfNumba")]


def test_a_given_stream_is_the_one_that_waits(log):
    seen = interop.view(OfNumba(np.zeros((4, 6), np.float32), stream=OWN), "x")
    work = interop.stream_of(seen, 0x300)
    interop.order_after(work, [seen], 0x300)
    assert log == [(0x300, "after", OWN), (OWN, "after", 0x300)]
    assert seen.held.stream == 0x300


def test_an_array_made_in_a_capture_is_refused_outside_of_it(log):
    seen = interop.view(OfNumba(np.zeros((4, 6), np.float32), stream=0xC00), "x")
    with pytest.raises(DeviceError, match="stream needs to be the captured one"):
        interop.stream_of(seen)


@pytest.fixture
def cupy_framework(log, monkeypatch):
    monkeypatch.setattr(device, "cupy", lambda: None)
    return cupy_arrays.Cupy()


def of_cupy(array, pointer=None):
    """Return what stands for an array of CuPy over the memory of the host."""
    fields = {name: getattr(array, name) for name in ("dtype", "shape", "strides", "itemsize")}
    at = array.ctypes.data if pointer is None else pointer
    return SimpleNamespace(data=SimpleNamespace(ptr=at, device_id=TARGET.device), **fields)


@pytest.mark.parametrize("cut", [np.s_[:], np.s_[1:, ::2], np.s_[::-1]])
def test_an_array_of_cupy_is_seen_where_its_memory_is(cupy_framework, cut):
    array = np.zeros((4, 6), np.float32)[cut]
    steps = tuple(step // 4 for step in array.strides)
    seen = cupy_framework.view(of_cupy(array), "x")
    assert seen[:5] == (array.ctypes.data, "float32", array.shape, steps, TARGET)
    pointer, rest = cupy_framework.signature(of_cupy(array))
    assert (pointer, rest) == (array.ctypes.data, (array.dtype, array.shape, array.strides, TARGET.device))


@pytest.mark.parametrize("step", [0, -1, 3, 26, 1 << 40, -(1 << 40) - 2])
def test_the_stride_of_an_axis_of_one_element_has_no_meaning(cupy_framework, step):
    row = np.arange(8, dtype=np.float32)
    for shape, steps in (((1, 8), (step, 4)), ((8, 1), (4, step)), ((1, 2, 4), (step, 16, 4))):
        x = np.lib.stride_tricks.as_strided(row, shape, steps)
        of_numba = OfNumba(x, strides=x.strides)
        for seen in (interop.view(x, "x"), cupy_framework.view(of_cupy(x), "x"), interop.view(of_numba, "x")):
            assert seen[:3] == (row.ctypes.data, "float32", shape)
            strides = [stride for stride, extent in zip(seen.strides, shape, strict=True) if extent > 1]
            assert strides == [by // 4 for by, extent in zip(steps, shape, strict=True) if extent > 1]
        got, want = fp8core.quantize(x), fp8core.quantize(row.reshape(shape))
        np.testing.assert_array_equal(got.data.view(np.uint8), want.data.view(np.uint8))
        np.testing.assert_array_equal(got.scale, want.scale)


@pytest.mark.parametrize(("pointer", "words"), [(0, "x needs memory"), (0x1002, "x needs elements at multiples of 4")])
def test_an_array_of_cupy_that_cannot_be_read_has_no_signature(cupy_framework, pointer, words):
    x = of_cupy(np.zeros((4, 6), np.float32), pointer)
    assert cupy_framework.signature(x) == (0, None)
    with pytest.raises(LayoutError, match=words):
        cupy_framework.view(x, "x")


def test_bytes_of_other_frameworks_become_fp8_over_the_same_memory(torch_cpu):
    codes = torch_cpu.arange(24, dtype=torch_cpu.uint8).reshape(4, 6)
    q = Float8Array(codes, "float8_e4m3fn")
    assert (type(q.codes), q.codes.ctypes.data) == (np.ndarray, codes.data_ptr())
    with pytest.raises(DTypeError, match="codes needs uint8, got float32"):
        Float8Array(codes.float(), "float8_e4m3fn")
    for fp8 in (codes.view(torch_cpu.float8_e5m2), q.view("float8_e5m2")):
        with pytest.raises(DTypeError, match="codes needs uint8, got float8_e5m2"):
            Float8Array(fp8, "float8_e5m2")
    with pytest.raises(DTypeError, match="codes needs an array of uint8, got builtins"):
        Float8Array(b"123", "float8_e4m3fn")


@pytest.fixture
def torch_cpu():
    return pytest.importorskip("torch")


@pytest.fixture
def strided_memory_view():
    return pytest.importorskip("cuda.core.utils", exc_type=ImportError).StridedMemoryView


def test_views_of_cuda_core_are_read_without_a_copy(strided_memory_view):
    x = np.arange(24, dtype=np.float32).reshape(4, 6)[:, :4]
    given = strided_memory_view.from_any_interface(x, stream_ptr=-1)
    seen = interop.view(given, "x")
    assert seen[:4] == (x.ctypes.data, "float32", (4, 4), (6, 1))
    got, want = fp8core.quantize(given), fp8core.quantize(x)
    assert isinstance(got.data, np.ndarray)
    np.testing.assert_array_equal(got.data.view(np.uint8), want.data.view(np.uint8))
    q = Float8Array(strided_memory_view.from_any_interface(x.view(np.uint8)[:, ::4], stream_ptr=-1), "float8_e5m2")
    assert q.codes.ctypes.data == x.ctypes.data


def test_a_read_only_view_of_cuda_core_is_no_destination(strided_memory_view):
    x = np.zeros((4, 8), np.float32)
    x.flags.writeable = False
    given = strided_memory_view.from_any_interface(x, stream_ptr=-1)
    with pytest.raises(LayoutError, match="out needs to be writable"):
        fp8core.dequantize(np.zeros((4, 8), np.uint8).view("float8_e4m3fn"), 1.0, out=given)
