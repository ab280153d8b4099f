"""Array interop on a GPU: pointers, memory and devices, for CuPy, torch and JAX."""

import numpy as np
import pytest

from fp8core import interop
from fp8core.dtypes import ITEMSIZE
from fp8core.errors import LayoutError
from fp8core.interop.float8 import DTYPES, Float8Array
from fp8core.runtime import device
from support.gpu_arrays import MAKERS, address, cupy, framework, jax, jax_array, torch  # noqa: F401

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_an_array_is_seen_as_it_is(framework, dtype):
    if (framework, dtype) == ("jax", "int64"):
        dtype = "int32"  # which JAX makes of it without 64-bit types
    x = MAKERS[framework]((3, 5), dtype)
    seen = interop.view(x, "x")
    assert seen[:5] == (address(x), dtype, (3, 5), (5, 1), device.target(device.current()))
    assert seen.owner is x
    assert seen.framework.name == framework


@pytest.mark.parametrize("dtype", [dtype for dtype in ITEMSIZE if dtype != "int64"])  # no result has it
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
    for view in (q, q.T):
        values = jax.numpy.asarray(view)  # by __jax_array__
        assert (str(values.dtype), values.shape) == (dtype, view.shape)
        assert (np.asarray(values).view(np.uint8) == view.codes.get()).all()
    assert address(jax.numpy.asarray(q)) == q.codes.data.ptr
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
        interop.check_writable(jax_array((2, 2), "float32"), "out")


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


def test_the_target_is_the_devices(cupy):
    target = device.target(device.current())
    properties = cupy.cuda.runtime.getDeviceProperties(device.current())
    assert target.multiprocessors == properties["multiProcessorCount"]
    assert target.warp == properties["warpSize"]
    if target.platform == "cuda":
        assert target.arch == properties["major"] * 10 + properties["minor"]
        assert target.shared_bytes == properties["sharedMemPerBlockOptin"]
