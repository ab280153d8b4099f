"""Memory used in a capture, on a GPU: a graph's replay leaves alone what was allocated since, and frees it at its end."""

import gc

import numpy as np
import pytest

from fp8core import interop
from fp8core.errors import LayoutError
from fp8core.interop import order_after, order_before
from fp8core.interop.float8 import Float8Array
from fp8core.runtime import capture, device, graph_memory, streams
from fp8core.runtime.releases import releases
from support.captures import cupy  # noqa: F401
from support.gpu_arrays import torch  # noqa: F401

pytestmark = pytest.mark.gpu

BYTES = 1 << 20
SECONDS = 60.0

PASS = r"""
extern "C" __global__ void pass(const unsigned char* x, unsigned char* y, int add)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = x[i] + add;
}
"""


@pytest.fixture
def through(cupy):
    """Return a function that launches x -> scratch -> y = x + 3 through a graph's scratch."""
    kernel = cupy.RawKernel(PASS, "pass")
    loaded = cupy.zeros(1, "uint8")
    kernel((1,), (1,), (loaded, loaded, np.int32(0)))  # which cannot be done in every capture

    def launch(x_at, y_at, stream):
        middle = graph_memory.scratch(BYTES, device.target(device.current()), stream)
        with device.cupy_stream(stream):
            kernel((BYTES // 256,), (256,), (np.uint64(x_at), np.uint64(middle), np.int32(1)))
            kernel((BYTES // 256,), (256,), (np.uint64(middle), np.uint64(y_at), np.int32(2)))
        return middle

    return launch


def in_use():
    graph_memory.sweep()
    return graph_memory._pool().used_bytes()


def falls_to(before):
    """Return whether no more is in use; the driver destroys on a thread of its own, which may take a moment."""
    gc.collect()
    device.cupy().cuda.Device().synchronize()
    return any(in_use() == before for _ in range(1_000_000))


def test_a_replay_writes_the_scratch_of_its_graph_and_nothing_else(cupy, through):
    before = in_use()
    x, y = cupy.zeros(BYTES, "uint8"), cupy.zeros(BYTES, "uint8")
    through_twice = set()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for _ in range(2):
            through_twice.add(through(x.data.ptr, y.data.ptr, stream.ptr))
        graph = stream.end_capture()
    assert len(through_twice) == 1
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    theirs = [cupy.full(BYTES, 0xAA, "uint8") for _ in range(64)]
    x.fill(5)
    y.fill(0)
    cupy.cuda.Device().synchronize()
    for value in (5, 9):
        x.fill(value)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert (y == value + 3).all()
    assert all((array == 0xAA).all() for array in theirs)
    assert in_use() >= before + BYTES
    del graph
    assert falls_to(before)


def test_replaced_scratch_stays_while_the_graph_is_there(cupy, through):
    before = in_use()
    target = device.target(device.current())
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        addresses = [graph_memory.scratch(nbytes, target, stream.ptr) for nbytes in (BYTES, 3 * BYTES, BYTES)]
        graph = stream.end_capture()
    assert addresses[0] != addresses[1] == addresses[2]
    assert in_use() >= before + 4 * BYTES
    del graph
    assert falls_to(before)


def test_a_capture_of_cupy_with_tensors_of_torch(cupy, torch, through):
    x, y = (torch.zeros(BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    stream = cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    with stream:
        stream.begin_capture()
        views = [interop.view(tensor, "x") for tensor in (x, y)]
        order_before(stream.ptr, views, stream)
        through(x.data_ptr(), y.data_ptr(), stream.ptr)
        order_after(stream.ptr, views, stream)
        graph = stream.end_capture()
    gc.collect()
    torch.cuda.empty_cache()
    theirs = [torch.full((BYTES,), 0xAA, dtype=torch.uint8, device="cuda") for _ in range(64)]
    others = [cupy.full(BYTES, 0xAA, "uint8") for _ in range(64)]
    x.fill_(11)
    torch.cuda.synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert (y == 14).all()
    assert all((array == 0xAA).all() for array in (*theirs, *others))


def test_a_capture_of_torch_allocates_in_any_mode(cupy, torch, through):
    x, y = (torch.zeros(BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    for mode in ("global", "thread_local", "relaxed"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            stream = torch.cuda.current_stream().cuda_stream
            assert device.capturing(stream)
            through(x.data_ptr(), y.data_ptr(), stream)
            graph_memory.allocate(64 * BYTES, device.target(device.current()), stream)  # which no pool has
        x.fill_(len(mode))
        graph.replay()
        torch.cuda.synchronize()
        assert (y == len(mode) + 3).all()
        graph.reset()


def test_the_driver_knows_captures_apart(cupy):
    one, two, side = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    cupy.cuda.Device().synchronize()
    assert capture.info(one.ptr) is None
    assert capture.info(0) is None
    one.begin_capture()
    two.begin_capture()
    first, second = capture.info(one.ptr), capture.info(two.ptr)
    event = cupy.cuda.Event(disable_timing=True)
    event.record(one)
    side.wait_event(event)
    assert capture.info(side.ptr) == first != second
    streams.join(one.ptr, two.ptr, device.current())  # nothing: another graph
    streams.join(one.ptr, 0, device.current())  # nothing: not captured
    streams.join(0, one.ptr, device.current())
    streams.join(one.ptr, side.ptr, device.current())  # which ends what was begun on the side
    one.end_capture()
    two.end_capture()


@pytest.mark.parametrize("blocking", [False, True])
def test_the_default_stream_is_asked_about_nothing_during_a_capture(cupy, blocking):
    stream = cupy.cuda.Stream(non_blocking=not blocking)
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    assert device.capturing(stream.ptr)
    assert not device.capturing(0)
    streams.join(stream.ptr, 0, device.current())
    streams.join(0, stream.ptr, device.current())
    stream.end_capture()


def test_a_number_is_written_by_the_graph(cupy, torch):
    number, x = {}, {"cupy": cupy.ones(1, "float32"), "torch": torch.ones(1, device="cuda")}
    stream = cupy.cuda.Stream(non_blocking=True)
    read = {name: cupy.zeros(1, "float32") for name in x}
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for name, array in x.items():
            view = interop.view(array, "x")
            number[name] = view.framework.number(0.375, view.target, stream.ptr)
            cupy.cuda.runtime.memcpyAsync(read[name].data.ptr, number[name].pointer, 4, 3, stream.ptr)
        graph = stream.end_capture()
    for _ in range(2):
        graph.launch(stream)
        stream.synchronize()
        assert [float(value[0]) for value in read.values()] == [0.375, 0.375]
        for value in read.values():
            value.fill(0)
        cupy.cuda.Device().synchronize()


def test_a_number_is_written_on_the_stream_and_waits_for_nothing(cupy, torch):
    for array in (cupy.ones(1, "float32"), torch.ones(1, device="cuda")):
        view = interop.view(array, "x")
        stream = interop.stream_of(view)
        number = view.framework.number(-2.5, view.target, stream)
        read = cupy.zeros(1, "float32")
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.memcpy(read.data.ptr, number.pointer, 4, 3)
        assert float(read[0]) == -2.5


# operands that are dropped, and results of other frameworks


SLOW = r"""
extern "C" __global__ void slow(const unsigned char* x, unsigned char* y, long long cycles)
{
    long long start = clock64();
    while (clock64() - start < cycles) {}
    y[threadIdx.x] = x[threadIdx.x];
}
"""
CYCLES = 200_000_000


@pytest.mark.parametrize("kind", ["torch", "cupy", "torch over cupy"])
def test_an_operand_may_be_dropped_after_a_call_on_another_stream(cupy, torch, kind):
    slow = cupy.RawKernel(SLOW, "slow")
    side = cupy.cuda.Stream(non_blocking=True)
    y = cupy.zeros(256, "uint8")
    slow((1,), (1,), (y, y, np.int64(1)))
    make = {
        "torch": lambda: torch.full((BYTES,), 5, dtype=torch.uint8, device="cuda"),
        "cupy": lambda: cupy.full(BYTES, 5, "uint8"),
        "torch over cupy": lambda: torch.from_dlpack(cupy.full(BYTES, 5, "uint8")),
    }[kind]
    x = make()
    cupy.cuda.Device().synchronize()
    views = [interop.view(x, "x")]
    order_before(side.ptr, views, side)
    with side:
        slow((1,), (256,), (np.uint64(views[0].pointer), y, np.int64(CYCLES)))
    order_after(side.ptr, views, side)
    del x, views
    gc.collect()
    for _ in range(8):
        taken = make()
        taken.fill_(9) if isinstance(taken, torch.Tensor) else taken.fill(9)
    side.synchronize()
    assert (y == 5).all()
    del taken
    assert releases().wait(SECONDS)


def test_a_result_in_memory_of_another_framework_can_be_read_there(cupy, torch):
    slow = cupy.RawKernel(SLOW, "slow")
    x, out = cupy.full(256, 7, "uint8"), torch.zeros(256, dtype=torch.uint8, device="cuda")
    slow((1,), (1,), (x, x, np.int64(1)))
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream, torch.cuda.stream(torch.cuda.Stream()):
        views = [interop.view(x, "x"), interop.view(out, "out")]
        order_before(stream.ptr, views)
        slow((1,), (256,), (x, np.uint64(out.data_ptr()), np.int64(CYCLES)))
        order_after(stream.ptr, views)
        copied = out.clone()
        torch.cuda.current_stream().synchronize()
    assert (copied == 7).all()


def test_an_operand_that_is_being_made_is_waited_for_on_a_given_stream(cupy, torch):
    slow = cupy.RawKernel(SLOW, "slow")
    source = cupy.full(256, 3, "uint8")
    x = torch.zeros(256, dtype=torch.uint8, device="cuda")
    y = cupy.zeros(256, "uint8")
    slow((1,), (1,), (source, source, np.int64(1)))
    cupy.cuda.Device().synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        with device.cupy_stream(torch.cuda.current_stream().cuda_stream):
            slow((1,), (256,), (source, np.uint64(x.data_ptr()), np.int64(CYCLES)))
        views = [interop.view(x, "x")]
        order_before(side.ptr, views, side)
        with side:
            slow((1,), (256,), (np.uint64(x.data_ptr()), y, np.int64(1)))
        order_after(side.ptr, views, side)
    side.synchronize()
    assert (y == 3).all()


def test_bytes_at_odd_addresses_are_bytes(cupy):
    memory = cupy.zeros(33, "uint8")
    assert interop.view(Float8Array(memory[1:], "float8_e4m3fn"), "q").pointer == memory.data.ptr + 1
    odd = cupy.ndarray((8,), "float32", memory.data + 1)
    with pytest.raises(LayoutError, match="scale needs elements at multiples of 4 bytes"):
        interop.view(odd, "scale")
    assert interop.framework_of(cupy.ndarray).signature(odd)[1] is None
