"""Arrays in and out on the host: the memory is the same, and kept as long as it is needed."""

import gc
import itertools
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from fp8core import interop
from fp8core.dtypes import ITEMSIZE
from fp8core.errors import LayoutError
from fp8core.target import HOST
from support.host_arrays import (  # noqa: F401
    ADDRESS,
    EIGHT,
    MAKERS,
    Exporter,
    OldExporter,
    framework,
    jax_array,
    numpy_array,
    torch_array,
)


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_an_array_is_seen_as_it_is(framework, dtype):
    x = MAKERS[framework]((3, 5), dtype)
    seen = interop.view(x, "x")
    assert seen.pointer == ADDRESS[framework](x)
    assert seen[1:5] == (dtype, (3, 5), (5, 1), HOST)
    assert type(seen.shape) is tuple
    assert type(seen.strides) is tuple
    assert seen.owner is x
    assert seen.framework.name == framework


@pytest.mark.parametrize("dtype", [dtype for dtype in ITEMSIZE if dtype != "int64"])  # no result has it
@pytest.mark.parametrize("shape", [(), (0, 5), (5, 0), (7,), (2, 3, 4)])
def test_a_result_is_the_memory_that_was_written(framework, dtype, shape):
    maker = interop.view(MAKERS[framework]((2, 2), "float32"), "x").framework
    result = maker.empty(shape, dtype, HOST)
    given = maker.wrap(result.array)
    seen = interop.view(given, "result")
    assert (seen.dtype, seen.shape) == (dtype, shape)
    assert seen.framework.name == ("numpy" if framework == "dlpack" else framework)
    assert 0 in shape or seen.pointer == result.pointer


def test_threads_that_meet_a_framework_at_once_get_the_same(framework, monkeypatch):
    """With two of them, arrays of one framework would seem to be of two, and be viewed and ordered in every call."""
    maker = interop.view(MAKERS[framework]((2, 2), "float32"), "x").framework
    find, both, make = sys.modules[type(maker).__module__].framework, Barrier(2), type(maker).__init__
    find.cache_clear()
    monkeypatch.setattr(type(maker), "__init__", lambda self, *given: (both.wait(30), make(self, *given))[1])
    with ThreadPoolExecutor(2) as threads:
        made = [job.result() for job in [threads.submit(find) for _ in range(2)]]
    assert made == [maker, maker]
    assert find() is maker


def test_a_result_can_have_strides(framework):
    maker = interop.view(MAKERS[framework]((2, 2), "float32"), "x").framework
    result = maker.empty((6, 4), "float32", HOST, (1, 6))
    seen = interop.view(maker.wrap(result.array), "result")
    assert (seen.pointer, seen.shape, seen.strides) == (result.pointer, (6, 4), (1, 6))


def test_a_result_can_have_gaps_where_the_framework_can(framework):
    maker = interop.view(MAKERS[framework]((2, 2), "float32"), "x").framework
    if framework == "jax":
        with pytest.raises(LayoutError, match=r"of jax needs elements without gaps, .*\(6, 4\).*\(8, 1\)"):
            maker.empty((6, 4), "float32", HOST, (8, 1))
    else:
        seen = interop.view(maker.wrap(maker.empty((6, 4), "float32", HOST, (8, 1)).array), "result")
        assert seen.strides == (8, 1)


@pytest.mark.parametrize("shape", [(6, 4), (1, 4), (6, 1), (1, 1), (0, 4), (3,), (2, 6, 4)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
def test_a_maker_gives_other_memory_of_the_same_form_each_time(framework, dtype, shape):
    kind = interop.view(MAKERS[framework]((2, 2), "float32"), "x").framework
    folded = [None] if len(shape) != 2 else [None, (1, shape[0])]
    if framework != "jax" and shape == (6, 4):
        folded.append((8, 1))
    for strides in folded:
        new, want = kind.allocator(shape, dtype, HOST, strides), kind.empty(shape, dtype, HOST, strides)
        results = [new(None) for _ in range(3)]
        views = [interop.view(kind.wrap(array), "result") for _, array in results]
        looks = interop.view(kind.wrap(want.array), "result")
        assert {view[1:5] for view in views} == {looks[1:5]}
        assert [view.pointer for view in views] == [pointer for pointer, _ in results]
        assert 0 in shape or len({pointer for pointer, _ in results}) == 3


@pytest.mark.parametrize("nbytes", [0, 1, 1000])
def test_scratch_lies_at_multiples_of_256_bytes(framework, nbytes):
    maker = interop.view(MAKERS[framework]((2, 2), "float32"), "x").framework
    results = [maker.scratch(nbytes, HOST) for _ in range(5)]
    assert all(result.pointer % 256 == 0 for result in results)
    ends = sorted((result.pointer, result.pointer + nbytes) for result in results)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_what_a_result_holds_outlives_the_result(framework):
    maker = interop.view(MAKERS[framework]((2, 2), "float32"), "x").framework
    result = maker.empty((4, 4), "float32", HOST)
    np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * 16).from_address(result.pointer))[:] = 7.0
    given = maker.wrap(result.array)
    del result
    gc.collect()
    _ = [np.zeros(16, np.float32) for _ in range(100)]
    assert float(np.from_dlpack(given).sum() if framework != "jax" else given.sum()) == 112.0


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", EIGHT)
def test_bytes_can_be_seen_as_another_dtype(framework, dtype):
    x = MAKERS[framework]((4, 6), "uint8")
    again = interop.view(interop.view(x, "x").framework.reinterpret(x, dtype), "again")
    assert again[:4] == (ADDRESS[framework](x), dtype, (4, 6), (6, 1))


def test_jax_has_no_other_view_of_its_memory():
    x = jax_array((4, 6), "uint8")
    with pytest.raises(LayoutError, match="jax cannot give the memory of an array another dtype"):
        interop.view(x, "x").framework.reinterpret(x, "float8_e5m2")


# strides


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("cut", "shape", "strides", "offset"),
    [
        (lambda x: x[2:5], (3, 16), (16, 1), 32),
        (lambda x: x[:, 4:8], (8, 4), (16, 1), 4),
        (lambda x: x[::2, ::4], (4, 4), (32, 4), 0),
        (lambda x: x.T, (16, 8), (1, 16), 0),
        (lambda x: x[3], (16,), (1,), 48),
        (lambda x: x[3:3], (0, 16), (16, 1), None),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_slices_are_reported_as_they_are(framework, cut, shape, strides, offset, dtype):
    x = MAKERS[framework]((8, 16), dtype)
    seen = interop.view(cut(x), "x")
    assert (seen.shape, seen.strides) == (shape, strides)
    assert offset is None or seen.pointer == ADDRESS[framework](x) + offset * ITEMSIZE[dtype]


def test_reversed_and_broadcast_arrays_are_reported_as_they_are():
    x = numpy_array((4, 4), "float32")
    assert interop.view(x[::-1], "x")[:4] == (x.ctypes.data + 48, "float32", (4, 4), (-4, 1))
    assert interop.view(np.broadcast_to(x[0], (9, 4)), "x").strides == (0, 1)
    assert interop.view(torch_array((1, 4), "float32").expand(9, 4), "x").strides == (0, 1)


def test_a_transposed_array_of_jax_is_contiguous_or_says_otherwise():
    x = jax_array((4, 8), "float32").T
    seen = interop.view(x, "x")
    flat = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * 32).from_address(seen.pointer))
    read = np.lib.stride_tricks.as_strided(flat, seen.shape, [4 * stride for stride in seen.strides])
    np.testing.assert_array_equal(read, np.asarray(x))


# torch


def test_tensors_that_require_grad_are_read_and_results_do_not():
    torch = pytest.importorskip("torch")
    x = torch.ones(3, 4, requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    for tensor in (x, parameter, x * 2):
        seen = interop.view(tensor, "x")
        assert seen.pointer == tensor.data_ptr()
        assert not seen.framework.wrap(seen.framework.empty((2,), "float32", HOST).array).requires_grad


def test_subclasses_of_tensors_are_tensors():
    torch = pytest.importorskip("torch")

    class Named(torch.Tensor):
        pass

    x = torch.ones(3, 4).as_subclass(Named)
    seen = interop.view(x, "x")
    assert seen.pointer == x.data_ptr()
    assert type(seen.framework.wrap(seen.framework.empty((2,), "float32", HOST).array)) is torch.Tensor


def test_inference_mode_changes_nothing():
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        x = torch.ones(3, 4)
        seen = interop.view(x, "x")
        assert seen.pointer == x.data_ptr()
        assert seen.framework.empty((2,), "float32", HOST).array.is_inference()


# lifetimes


@pytest.mark.parametrize("kind", [Exporter, OldExporter])
def test_a_view_keeps_the_memory_until_it_dies_and_lets_it_go_once(kind):
    array = np.ones((3, 5), np.uint8)

    class Counted(np.ndarray):
        pass

    array = array.view(Counted)
    alive = weakref.ref(array)
    seen = interop.view(kind(array, "float8_e5m2"), "x")
    assert (seen.dtype, seen.shape, seen.strides) == ("float8_e5m2", (3, 5), (5, 1))
    pointer = array.ctypes.data
    del array
    gc.collect()
    assert alive() is not None
    assert seen.pointer == pointer
    del seen
    gc.collect()
    assert alive() is None


def test_views_leave_no_references_behind(framework):
    import sys

    x = MAKERS[framework]((3, 5), "float32")
    interop.view(x, "x")
    before = sys.getrefcount(x)
    for _ in range(100):
        interop.view(x, "x")
    assert sys.getrefcount(x) == before


def test_threads_see_the_same(framework):
    xs = [MAKERS[framework]((3, 5 + i), "float32") for i in range(8)]

    def work(i: int) -> bool:
        x = xs[i % 8]
        seen = interop.view(x, "x")
        result = seen.framework.empty((4, 4), "float8_e4m3fn", HOST)
        given = interop.view(seen.framework.wrap(result.array), "result")
        return seen.pointer == ADDRESS[framework](x) and given.pointer == result.pointer

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))
