"""DLPack itself: capsules of older and unknown kinds, and the table of functions of its version 1.3."""

import ctypes
import gc
import os
import sys
import threading
import weakref
from unittest.mock import Mock

import pytest

import fp8core
from fp8core import interop
from fp8core.dtypes import ITEMSIZE
from fp8core.errors import BackendError, DTypeError, LayoutError
from fp8core.interop import dlpack, dlpack_capsule, dlpack_exchange, frameworks
from fp8core.interop.dlpack_views import target_of
from fp8core.ops.layer_weight import aligned_rows
from fp8core.runtime import device
from fp8core.target import HOST
from support.host_arrays import codes, exporter
from support.targets import H200, MI300

# DLPack


def test_a_consumed_capsule_is_refused():
    torch = pytest.importorskip("torch")
    capsule = codes().__dlpack__()
    torch.from_dlpack(capsule)
    with pytest.raises(BufferError, match="a DLPack capsule is needed, got one named b'used_dltensor"):
        dlpack.read(capsule)


def test_another_major_version_is_refused():
    capsule = codes().__dlpack__(max_version=(1, 0))
    dlpack.managed(capsule).major = 2
    try:
        with pytest.raises(BufferError, match=r"DLPack 2\.0 is not supported"):
            dlpack.read(capsule)
    finally:
        dlpack.ManagedVersioned.from_address(dlpack._address(capsule, b"dltensor_versioned")).major = 1


def test_left_out_strides_are_those_of_a_contiguous_array():
    capsule = codes((2, 3, 4)).__dlpack__()
    tensor = dlpack.managed(capsule).tensor
    strides = tensor.strides
    tensor.strides = None
    assert dlpack.read(capsule).strides == (12, 4, 1)
    tensor.strides = strides


def test_an_offset_in_bytes_counts():
    held = codes()
    capsule = held.__dlpack__()
    dlpack.managed(capsule).tensor.byte_offset = 48
    assert dlpack.read(capsule).pointer == held.ctypes.data + 48


def test_of_its_flags_one_says_that_a_tensor_is_read_only():
    capsule = codes().__dlpack__(max_version=(1, 0))
    for flags, read_only in ((2, False), (3, True), (0, False)):
        dlpack.managed(capsule).flags = flags
        assert dlpack.read(capsule).read_only == read_only


def test_only_equally_wide_elements_can_be_renamed():
    with pytest.raises(BufferError, match="8 bits cannot be called bfloat16"):
        dlpack.retag(codes().__dlpack__(), "bfloat16")


def test_vectors_and_unknown_codes_are_named():
    capsule = codes().__dlpack__()
    tensor = dlpack.managed(capsule).tensor
    tensor.lanes = 4
    assert dlpack.read(capsule).dtype == "uint8 x 4"
    tensor.lanes, tensor.code = 1, 77
    assert dlpack.read(capsule).dtype == "type code 77 of bits 8"


def test_pinned_memory_is_the_host_s_and_managed_memory_the_gpu_s(monkeypatch):
    monkeypatch.setattr(device, "target", lambda ordinal: H200._replace(device=ordinal))
    for kind in (dlpack.CPU, dlpack.CUDA_HOST, dlpack.ROCM_HOST):
        assert target_of(kind, 3, "x") is HOST
    for kind in (dlpack.CUDA, dlpack.ROCM, dlpack.CUDA_MANAGED):
        assert target_of(kind, 3, "x").device == 3


# the exchange table, offered by torch: here it stands for a framework that is not known


@pytest.fixture
def table():
    torch = pytest.importorskip("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch is older than 2.10")
    return dlpack_exchange.framework(torch.Tensor)


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_an_array_is_read_through_the_table(table, dtype):
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, 6, dtype=getattr(torch, dtype))[1:3, 2:]
    seen = table.view(x, "x")
    assert seen[:5] == (x.data_ptr(), dtype, (2, 4), (6, 1), HOST)
    assert seen.framework.name == "torch"
    assert table.stream(HOST) == 0


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), None), ((0, 3), None), ((4, 6), None), ((4, 6), (1, 4)), ((2, 3, 4), (4, 8, 1)), ((5, 1), (1, 7))],
)
def test_the_table_allocates(table, dtype, shape, strides):
    result = table.empty(shape, dtype, HOST, strides)
    given = table.wrap(result.array)
    assert str(given.dtype) == f"torch.{dtype}"
    assert tuple(given.shape) == shape
    assert given.data_ptr() == result.pointer
    if strides:
        assert all(have == want for have, want, n in zip(given.stride(), strides, shape, strict=True) if n > 1)
    else:
        assert given.is_contiguous()


def test_the_table_leaves_no_references_behind(table):
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, 6)
    table.view(x, "x")
    before = sys.getrefcount(x)
    for _ in range(100):
        table.view(x, "x")
    assert sys.getrefcount(x) == before
    given = table.wrap(table.empty((3,), "float32", HOST).array)
    alive = weakref.ref(given)
    del given
    gc.collect()
    assert alive() is None


def test_the_tables_other_way_of_reading_holds_and_lets_go(table, monkeypatch):
    torch = pytest.importorskip("torch")
    x, deleted, delete = torch.zeros(4, 6), [], dlpack_exchange._delete
    monkeypatch.setattr(dlpack_exchange, "_delete", lambda *made: (deleted.append(made), delete(*made)))
    fewer = dlpack_exchange.Exchange(torch.Tensor)
    fewer._read = None
    seen = fewer.view(x, "x")
    assert seen[:4] == (x.data_ptr(), "float32", (4, 6), (6, 1))
    assert seen.held is not None
    gc.collect()
    assert not deleted
    del seen
    gc.collect()
    assert len(deleted) == 1


def test_a_table_that_fails_leaves_nothing_behind(table, monkeypatch):
    torch = pytest.importorskip("torch")
    fails = dlpack_exchange.Exchange(torch.Tensor)
    ignored, deleted, delete = [], [], dlpack_exchange._delete
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    monkeypatch.setattr(dlpack_exchange, "_delete", lambda *made: (deleted.append(made), delete(*made)))
    fails._read = None
    for status, words in ((-1, "failed with -1"), (0, "gave no tensor")):
        fails._from_object = lambda x, out, status=status: status
        with pytest.raises(LayoutError, match=f"managed_tensor_from_py_object {words}"):
            fails.view(torch.zeros(3), "x")
    fails._to_object = lambda made, out: -1
    with pytest.raises(BufferError, match="managed_tensor_to_py_object failed with -1"):
        fails.empty((3,), "float32", HOST)
    assert not fails.allocates
    gc.collect()
    assert not ignored
    assert len(deleted) == 2
    for status in (0, -1):
        fails._allocate = lambda prototype, made, context, tell, status=status: status
        with pytest.raises(BackendError, match=r"torch cannot allocate \(3,\) of float32 on host"):
            fails.empty((3,), "float32", HOST)
        assert not fails.allocates
    monkeypatch.setattr(fails, "_allocate", Mock(side_effect=NotImplementedError))
    assert not fails.allocates
    assert len(deleted) == 2


def test_a_read_only_array_of_the_table_is_refused_before_anything_is_written(table, monkeypatch):
    torch = pytest.importorskip("torch")

    class Unknown(torch.Tensor):
        pass

    monkeypatch.setitem(frameworks._FOUND, Unknown, table)
    real, deleted, delete = table._from_object, [], dlpack_exchange._delete
    monkeypatch.setattr(dlpack_exchange, "_delete", lambda *made: (deleted.append(made), delete(*made)))

    def marked(x, address):
        status = real(x, address)
        dlpack.ManagedVersioned.from_address(address._obj.value).flags |= flags
        return status

    monkeypatch.setattr(table, "_from_object", marked)
    memory = torch.full((32,), 0x38, dtype=torch.uint8).as_subclass(Unknown)
    q, out = memory[:6].view(2, 3).view(torch.float8_e4m3fn), torch.zeros(2, 3).as_subclass(Unknown)
    flags = dlpack.READ_ONLY
    with pytest.raises(LayoutError, match="out needs to be writable, got a read-only Unknown"):
        fp8core.dequantize(q, 2.0, out=out)
    assert not out.any()
    flags = 2
    assert fp8core.dequantize(q, 2.0, out=out) is out
    assert bool((out == 2).all())
    with pytest.raises(LayoutError, match="out needs memory of its own, got an array that overlaps q"):
        fp8core.dequantize(q, 1.0, out=memory[4:28].view(torch.float32).view(2, 3))
    assert len(deleted) == 3
    monkeypatch.setattr(table, "_from_object", lambda x, address: -1)
    with pytest.raises(LayoutError, match=r"out needs a writable array that .*Unknown: BufferError: .*failed with"):
        table.check_writable(out, "out")


def test_the_table_refuses_gaps_and_what_it_does_not_know(table):
    torch = pytest.importorskip("torch")
    with pytest.raises(LayoutError, match="of torch needs elements without gaps, got"):
        table.empty((4, 6), "float32", HOST, (8, 1))
    with pytest.raises(LayoutError, match=r"to be the current one of torch, which allocates for no other, .* got 0x70"):
        table.empty((4, 6), "float32", HOST, None, 0x70)
    with pytest.raises(DTypeError, match=r"scale needs an array of .*float64"):
        table.view(torch.zeros(3, dtype=torch.float64), "scale")
    with pytest.raises(LayoutError, match=r"x needs an array that exports itself by DLPack, got torch\.Tensor: "):
        table.view(torch.zeros(3).to_sparse(), "x")


def test_the_table_tells_its_current_stream(table, monkeypatch):
    def current(kind, ordinal, stream):
        stream._obj.value = streams[kind]
        return -1 if ordinal else 0

    streams = {dlpack.CUDA: 0x70, dlpack.ROCM: None}
    monkeypatch.setattr(table, "_current_stream", current)
    assert [table.stream(target) for target in (H200, MI300, HOST)] == [0x70, 0, 0]
    with pytest.raises(BufferError, match="current_work_stream failed with -1"):
        table.stream(H200._replace(device=1))
    assert table.wrap(table.empty((3,), "float32", HOST, None, 0).array).shape == (3,)


def test_the_codes_of_a_weight_have_no_gaps_where_arrays_cannot_have_any(table, monkeypatch):
    torch = pytest.importorskip("torch")
    weight = torch.zeros(3, 5)
    seen = table.view(weight, "weight")._replace(target=H200)
    monkeypatch.setattr(interop, "view", lambda *_: seen)
    assert aligned_rows(weight, "float8_e4m3fn") is None


def test_a_later_table_leads_to_an_earlier_one(table):
    torch = pytest.importorskip("torch")
    name = dlpack_exchange._CAPSULE
    later = dlpack_exchange._Api(2, 1, dlpack._address(torch.Tensor.__dlpack_c_exchange_api__, name))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

    class Later:
        __dlpack_c_exchange_api__ = capsule(ctypes.addressof(later), name, None)

    x = torch.zeros(4, 6)
    assert dlpack_exchange.Exchange(Later).view(x, "x").pointer == x.data_ptr()
    later.previous = None
    with pytest.raises(
        BackendError, match=rf"{__name__.partition('.')[0]} offers DLPack's exchange table 2\.1, 1\.x is"
    ):
        dlpack_exchange.Exchange(Later)


def test_a_type_that_offers_the_table_is_read_through_it():
    torch = pytest.importorskip("torch")

    class Unknown:
        __dlpack_c_exchange_api__ = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)

    if Unknown.__dlpack_c_exchange_api__ is None:
        pytest.skip("this torch is older than 2.10")
    framework = interop.framework_of(Unknown)
    assert isinstance(framework, dlpack_exchange.Exchange)
    assert framework.name == __name__.partition(".")[0]


@pytest.mark.parametrize(
    "offered", [None, property(lambda self: pytest.fail("it is read")), "table"], ids=["none", "property", "text"]
)
def test_what_is_no_table_is_not_read(offered):
    """The error of Python about a capsule named no operand."""
    x = exporter((2, 3), "float32")
    other = type("Other", (type(x),), {"__dlpack_c_exchange_api__": offered})(x.array, x.dtype)
    assert interop.view(other, "x")[:4] == interop.view(x, "x")[:4]


class Producer:
    """An array whose capsules say when they are made and dropped, and take as long to make as ``wait`` does."""

    def __init__(self, found, wait=lambda: None):
        self.found, self.wait = found, wait

    def __dlpack__(self, **_):
        self.wait()
        self.found.append("made")
        capsule = set()
        weakref.finalize(capsule, self.found.append, "dropped")
        return capsule


@pytest.mark.parametrize(("stream", "order"), [(1, ["made", "made", "dropped"]), (None, ["made", "dropped", "made"])])
def test_only_on_the_host_is_a_capsule_dropped_while_another_is_made(stream, order):
    """XLA's plug-ins for GPUs lose count of an array's exports otherwise, and end the process.

    On the host JAX waits for the program that writes the array. Its handlers collect garbage, and would wait for JAX.
    """
    found, making, go_on, dropped = [], threading.Event(), threading.Event(), threading.Event()
    kept = [dlpack_capsule.Export(Producer(found), stream)]

    def wait():
        making.set()
        assert go_on.wait(30)

    def drop():
        kept.clear()
        dropped.set()

    maker = threading.Thread(target=lambda: kept.append(dlpack_capsule.Export(Producer(found, wait), stream)))
    maker.start()
    assert making.wait(30)
    dropper = threading.Thread(target=drop)
    dropper.start()
    dropped.wait(10 if stream is None else 0.2)  # what goes wrong has had the time
    go_on.set()
    for thread in (maker, dropper):
        thread.join(30)
        assert not thread.is_alive()
    assert found[:3] == order


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_capsules_are_made_in_the_child_of_a_fork_amid_an_export():
    def wait():
        child = os.fork()
        if not child:
            thread = threading.Thread(target=lambda: dlpack_capsule.Export(Producer([]), 1), daemon=True)
            thread.start()
            thread.join(30)
            os._exit(thread.is_alive())
        assert os.waitpid(child, 0)[1] == 0

    dlpack_capsule.Export(Producer([], wait), 1)
