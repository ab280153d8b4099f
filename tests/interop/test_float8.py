"""Float8Array over bytes of the host: views of it, and its export under its own dtype."""

import copy
import gc
import pickle
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from fp8core import interop
from fp8core.errors import DTypeError, LayoutError
from fp8core.interop import dlpack
from fp8core.interop.float8 import DTYPES, Float8Array
from fp8core.target import HOST
from support.host_arrays import codes


def address(x) -> int:
    return x.data_ptr() if hasattr(x, "data_ptr") else x.unsafe_buffer_pointer()


def as_torch(x):
    return pytest.importorskip("torch").from_dlpack(x)


def as_jax(x):
    return pytest.importorskip("jax").dlpack.from_dlpack(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("take", [as_torch, as_jax])
def test_it_is_taken_over_under_its_dtype_without_a_copy(take, dtype):
    held = codes()
    taken = take(Float8Array(held, dtype))
    assert str(taken.dtype).removeprefix("torch.") == dtype
    assert tuple(taken.shape) == (8, 16)
    assert address(taken) == held.ctypes.data


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("take", [as_torch, as_jax])
def test_there_and_back_is_the_same_memory(take, dtype):
    held = codes()
    seen = interop.view(take(Float8Array(held, dtype)), "q")
    assert seen[:4] == (held.ctypes.data, dtype, (8, 16), (16, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_seen_as_it_is(dtype):
    held = codes()
    q = Float8Array(held, dtype)
    seen = interop.view(q, "q")
    assert seen[:5] == (held.ctypes.data, dtype, (8, 16), (16, 1), HOST)
    assert seen.owner is q
    assert seen.framework.name == "numpy"
    held.flags.writeable = False
    with pytest.raises(LayoutError, match="out needs to be writable"):
        interop.check_writable(q, "out")


def test_parts_of_it_share_its_memory():
    held = codes()
    q = Float8Array(held, "float8_e4m3fn")
    for part, want in (
        (q[2:5], held[2:5]),
        (q[3], held[3]),
        (q[::2, 4:8], held[::2, 4:8]),
        (q.T, held.T),
        (q.reshape(4, 32), held.reshape(4, 32)),
        (q.view("float8_e5m2"), held),
        (q.view(ml_dtypes.float8_e5m2), held),
    ):
        assert isinstance(part, Float8Array)
        assert part.codes.ctypes.data == want.ctypes.data
        assert (part.shape, part.strides, part.ndim, part.size) == (want.shape, want.strides, want.ndim, want.size)
    assert q.view("uint8") is held
    assert len(q) == 8
    assert q.nbytes == 128
    torch = pytest.importorskip("torch")
    taken = torch.from_dlpack(q[2:5, 4:8])
    assert (taken.data_ptr(), taken.stride()) == (held.ctypes.data + 36, (16, 1))


def test_one_number_of_it_is_no_array():
    with pytest.raises(LayoutError, match="is one number of Float8Array"):
        Float8Array(codes(), "float8_e4m3fn")[1, 2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_get_gives_the_values(dtype):
    q = Float8Array(codes((16, 16)), dtype)
    want = np.arange(256, dtype=np.uint8).reshape(16, 16).view(getattr(ml_dtypes, dtype))
    assert q.get().dtype == want.dtype
    np.testing.assert_array_equal(q.get().view(np.uint8), want.view(np.uint8))


def test_its_repr_has_its_layout_and_codes_of_other_kinds_are_refused():
    q = Float8Array(codes(), "float8_e4m3fn")
    assert repr(q).endswith("shape=(8, 16), dtype=float8_e4m3fn, strides=(16, 1), device=cpu)")
    assert not hasattr(q, "__cuda_array_interface__")
    with pytest.raises(DTypeError, match="codes needs uint8, got float32"):
        Float8Array(np.zeros(3, np.float32), "float8_e4m3fn")
    with pytest.raises(LayoutError, match="codes needs a plain array, got a masked one, whose mask would be lost"):
        Float8Array(np.ma.masked_array(codes(), mask=True), "float8_e4m3fn")
    with pytest.raises(DTypeError, match=r"dtype needs one of float8_e4m3fn, .*got 'float16'"):
        Float8Array(codes(), "float16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_its_dtype_may_be_that_of_any_framework(dtype):
    """A dtype of NumPy was kept as it is, as it equals its name; repr and == then failed or were wrong."""
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    values = Float8Array(codes(), dtype).tolist()
    scalars = getattr(ml_dtypes, dtype), getattr(jnp, dtype)
    for one in (*scalars, *map(np.dtype, scalars), getattr(torch, dtype), np.str_(dtype)):
        for q in (Float8Array(codes(), one), Float8Array(codes(), "float8_e5m2").view(one)):
            assert type(q.dtype) is str
            assert q.dtype == dtype
            np.testing.assert_array_equal(q.tolist(), values)
            assert (q == q.copy()).any()
            assert repr(q).startswith("Float8Array([[")


class OnGpu(np.ndarray):
    """Bytes that have to be fetched, as CuPy's."""

    def get(self):
        return np.array(self)


def codes_on_gpu(shape=(8, 16)):
    return codes(shape).view(OnGpu)


def test_its_text_shows_the_corners_of_an_array_in_host_memory():
    q = Float8Array(np.array([[0x38, 0xB8], [0x7F, 0x7E]], np.uint8), "float8_e4m3fn")
    form = "shape=(2, 2), dtype=float8_e4m3fn, strides=(2, 1), device=cpu)"
    assert repr(q) == f"Float8Array([[1, -1],\n             [nan, 448]],\n            {form}"
    large = repr(Float8Array(codes((256, 256)), "float8_e5m2"))
    assert large.count("...") == 7
    assert len(large.splitlines()) < 20


def test_its_text_reads_nothing_from_a_gpu(monkeypatch):
    monkeypatch.setattr(OnGpu, "get", lambda self: pytest.fail("the text reads the values"))
    q = Float8Array(codes_on_gpu(), "float8_e4m3fn")
    assert repr(q) == "Float8Array(shape=(8, 16), dtype=float8_e4m3fn, strides=(16, 1), device=cpu)"


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_takes_it_without_a_copy(dtype):
    held = codes((16, 16))
    q = Float8Array(held, dtype)
    taken = np.asarray(q)
    assert taken.dtype == getattr(ml_dtypes, dtype)
    assert taken.ctypes.data == held.ctypes.data
    assert np.array(q).ctypes.data != held.ctypes.data
    np.testing.assert_array_equal(np.asarray(q, np.float32), q.get().astype(np.float32))
    with pytest.raises(ValueError, match="avoid copy"):
        np.asarray(q, np.float32, copy=False)


def test_numpy_takes_none_from_a_gpu_unasked():
    q = Float8Array(codes_on_gpu(), "float8_e4m3fn")
    with pytest.raises(TypeError, match=r"NumPy needs an array in host memory, got Float8Array\(.*: call \.get\(\)"):
        np.asarray(q)
    assert type(q.get()) is np.ndarray
    np.testing.assert_array_equal(q.tolist(), q.get().astype(float))


@pytest.mark.parametrize("make", [codes, codes_on_gpu])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_compared_element_by_element(dtype, make):
    q = Float8Array(np.repeat(make((256, 1)), 256, 1), dtype)
    values = np.asarray(q.codes).view(getattr(ml_dtypes, dtype)).astype(np.float64)
    np.testing.assert_array_equal(q == q.T, values == values.T)
    np.testing.assert_array_equal(q != q.T, values != values.T)
    for number in (0, -0.0, 1, -1.5, 1.01, 448, 1e9, np.float32(0.5), float("inf"), float("nan")):
        np.testing.assert_array_equal(q == number, values == number)
        if type(number) is not np.float32:  # a NumPy number on the left is NumPy's to compare
            np.testing.assert_array_equal(number != q, values != number)
    for number in (10**400, -(10**400)):  # NumPy's float64 cannot hold these
        assert not (q == number).any()


def test_values_in_a_file_are_compared_with_those_in_memory(tmp_path):
    """A memmap is a NumPy array of a type of its own."""
    held = codes()
    mapped = np.memmap(tmp_path / "codes", np.uint8, "w+", shape=held.shape)
    mapped[:] = held
    q, of_file = Float8Array(held, "float8_e4m3fn"), Float8Array(mapped, "float8_e4m3fn")
    for one, other in ((q, of_file), (of_file, q)):
        np.testing.assert_array_equal(one == other, q == q)
        np.testing.assert_array_equal(one != other, q != q)


def test_what_is_nothing_of_its_kind_is_not_equal():
    q = Float8Array(codes(), "float8_e4m3fn")
    for other in (None, "q", q.view("float8_e5m2"), Float8Array(codes_on_gpu(), "float8_e4m3fn"), [1.0]):
        assert (q == other) is False
        assert (q != other) is True
    np.testing.assert_array_equal(q == q.get(), q == q)  # NumPy compares its arrays, whichever comes first
    np.testing.assert_array_equal(q.get() == q, q == q)
    with pytest.raises(TypeError, match="unhashable"):
        hash(q)


@pytest.mark.parametrize("make", [codes, codes_on_gpu])
def test_membership_truth_and_iteration_are_numpys(make):
    q = Float8Array(make(), "float8_e4m3fn")
    values = np.asarray(q.codes).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for number in (0, -0.0, 1, 1.01, -448, float("nan"), np.float32(0.5)):
        assert (number in q) is bool(number in values), number
    assert q[2] in q
    for other in (None, "q", [1.0], q.view("float8_e5m2")):
        assert other not in q
    for one in (q[:1, :1], q[0, 5:6], q.reshape(-1)[:1].reshape(())):
        assert bool(one) is bool(one.item())
    for none in (q, q[:0], q[0, :2]):
        with pytest.raises(ValueError, match=rf"the truth value of {none.size} elements is ambiguous"):
            bool(none)
    np.testing.assert_array_equal([row.codes for row in q], q.codes)
    with pytest.raises(TypeError, match="unsized"):
        iter(q[:1, :1].reshape(()))


def test_copies_and_numbers_of_it():
    q = Float8Array(codes().T[::2], "float8_e5m2")
    made = q.copy()
    assert (made.shape, made.strides, made.itemsize) == ((8, 8), (8, 1), 1)
    assert made.codes.ctypes.data != q.codes.ctypes.data
    np.testing.assert_array_equal(made.codes, q.codes)
    want = q.get().astype(float)
    np.testing.assert_array_equal(q.tolist(), want)
    assert q.item(3, -1) == want[3, -1]
    assert q[1:2, 2:3].item() == want[1, 2]
    assert type(q.item(0, 0)) is float
    with pytest.raises(ValueError, match="size 1"):
        q.item()


@pytest.mark.parametrize("shape", [(), (1,), (12,), (4, 3), (2, 2, 3), (0, 3)])
def test_items_are_numpys(shape):
    array = np.arange(np.prod(shape, dtype=int), dtype=np.uint8).reshape(shape)
    q, values = Float8Array(array, "float8_e4m3fn"), array.view(ml_dtypes.float8_e4m3fn).astype(float)
    whole = [(), (0,), (5,), (-1,), (99,), (np.int64(2),), ((0,),), ((),), (1.5,), ("0",), (0, 0, 0, 0)]
    for index in (*whole, *((at, -1) for at in (0, -2, 99)), ((1, 2),), (1, 1, 2), (-1, -2, -3)):
        try:
            want = values.item(*index)
        except (IndexError, TypeError, ValueError) as error:
            with pytest.raises(type(error)):
                q.item(*index)
        else:
            assert q.item(*index) == want, index


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, *(lambda x, p=p: pickle.loads(pickle.dumps(x, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1))],
)
def test_it_can_be_copied_and_pickled(again):
    q = Float8Array(codes(), "float8_e4m3fn")
    made = again(q)
    assert made.dtype == q.dtype
    np.testing.assert_array_equal(made.codes, q.codes)
    assert made.codes.ctypes.data != q.codes.ctypes.data


def test_it_can_be_referred_to_weakly_as_arrays_of_every_framework_can():
    q = Float8Array(codes(), "float8_e4m3fn")
    seen = weakref.ref(q)
    assert seen() is q
    del q
    assert seen() is None


def test_what_took_it_over_keeps_its_memory_and_lets_it_go_once():
    for take in (as_torch, as_jax):
        held = codes()
        q = Float8Array(held, "float8_e4m3fn")
        before = sys.getrefcount(held)
        taken = [take(q) for _ in range(10)]
        assert sys.getrefcount(held) > before
        del taken
        gc.collect()
        assert sys.getrefcount(held) == before


@pytest.mark.parametrize("options", [{}, {"max_version": (1, 0)}, {"max_version": (0, 8)}, {"stream": None}])
def test_a_capsule_that_nobody_takes_lets_go(options):
    held = codes()
    q = Float8Array(held, "float8_e5m2")
    before = sys.getrefcount(held)
    capsule = q.__dlpack__(**options)
    assert dlpack.read(capsule)[:4] == (held.ctypes.data, "float8_e5m2", (8, 16), (16, 1))
    versioned = options.get("max_version", (0, 8)) >= (1, 0)
    assert isinstance(dlpack.managed(capsule), dlpack.ManagedVersioned if versioned else dlpack.Managed)
    assert sys.getrefcount(held) == before + 1
    del capsule
    assert sys.getrefcount(held) == before


def test_a_copy_can_be_asked_for():
    held = codes()
    capsule = Float8Array(held, "float8_e4m3fn").__dlpack__(copy=True, max_version=(1, 0))
    assert dlpack.read(capsule).pointer != held.ctypes.data
    assert dlpack.read(capsule).dtype == "float8_e4m3fn"


def test_threads_can_export_the_same_array():
    torch = pytest.importorskip("torch")
    held = codes()
    q = Float8Array(held, "float8_e4m3fn")
    before = sys.getrefcount(held)
    with ThreadPoolExecutor(8) as pool:
        pointers = list(pool.map(lambda _: torch.from_dlpack(q).data_ptr(), range(400)))
    gc.collect()
    assert set(pointers) == {held.ctypes.data}
    assert sys.getrefcount(held) == before
