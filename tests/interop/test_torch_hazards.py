"""Tensors that are not what they seem: refused by name, on every call, and without a trace in what later calls use."""

import os

import numpy as np
import pytest

import fp8core
from fp8core import interop
from fp8core.core import signature
from fp8core.errors import LayoutError
from support.torch_tensors import matrix, run, torch_framework

torch = pytest.importorskip("torch")


# the negative bit


def negative(shape=(4, 32), dtype=torch.float32):
    """Return a tensor of ones behind the negative bit of torch, with the strides of a plain one."""
    return torch._neg_view(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize(
    "x",
    [
        negative(),
        negative(()),
        negative((1,)),
        negative((0, 4)),
        negative(dtype=torch.bfloat16),
        torch.complex(torch.ones(4, 32), torch.ones(4, 32)).conj().imag,
        torch.complex(torch.ones(4), torch.ones(4)).conj().imag[:, None][:, :1],
    ],
    ids=lambda x: f"{x.dtype}{tuple(x.shape)}{x.stride()}",
)
def test_the_negative_bit_is_refused_whatever_the_strides(x):
    assert x.is_neg()
    with pytest.raises(LayoutError, match=r"scale needs its values in memory, got torch's negative bit"):
        interop.view(x, "scale")
    assert signature.signature((x,))[1] is None


def test_the_negative_bit_is_refused_where_a_call_is_cached():
    x, scale = matrix(), torch.full((1,), 0.5)
    for _ in range(3):
        fp8core.quantize(x, group_shape=fp8core.PER_TENSOR, scale=scale)
        fp8core.quantize(x)
    hidden, hidden_scale = torch._neg_view(x), torch._neg_view(scale)
    for _ in range(2):
        with pytest.raises(LayoutError, match="x needs its values in memory"):
            fp8core.quantize(hidden)
        with pytest.raises(LayoutError, match="scale needs its values in memory"):
            fp8core.quantize(x, group_shape=fp8core.PER_TENSOR, scale=hidden_scale)
    assert not torch_framework().guard((x,))(hidden)


# misaligned elements


def test_elements_at_odd_addresses_are_refused_where_a_call_is_cached():
    memory = bytearray(4 * 32 * 4 + 4)
    x = torch.frombuffer(memory, dtype=torch.float32, count=128, offset=1).reshape(4, 32)
    fp8core.quantize(torch.zeros(4, 32))
    for _ in range(2):
        with pytest.raises(LayoutError, match="x needs elements at multiples of 4 bytes, got address 0x"):
            fp8core.quantize(x)
    assert torch_framework().signature(x)[1] is None


# subclasses


class Wrapper(torch.Tensor):
    """A tensor without memory that stands for another, as DTensor does."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


class Logged(torch.Tensor):
    """A tensor with memory of its own and __torch_dispatch__."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def distributed():
    tensor = pytest.importorskip("torch.distributed.tensor")
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    return tensor.distribute_tensor(matrix(), dist.init_device_mesh("cpu", (1,)), [tensor.Replicate()])


@pytest.mark.parametrize("make", [lambda: Wrapper(matrix()), lambda: matrix().as_subclass(Logged)])
def test_subclasses_that_stand_for_something_else_are_refused(make):
    x = make()
    for _ in range(2):
        with pytest.raises(LayoutError, match=r"x needs memory of its own, got a (Wrapper|Logged), whose class has"):
            fp8core.quantize(x)
    assert signature.signature((x,))[1] is None


def test_distributed_tensors_are_refused():
    try:
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend
    except ImportError:
        pytest.skip("this torch has no fake process group")
    x = distributed()
    try:
        with pytest.raises(LayoutError, match="x needs memory of its own, got a DTensor"):
            fp8core.quantize(x)
        fp8core.quantize(x.to_local())
    finally:
        torch.distributed.destroy_process_group()


def test_functional_tensors_are_refused():
    for x in (torch._to_functional_tensor(matrix()), torch._to_functional_tensor(torch.zeros(0, 4))):
        with pytest.raises(LayoutError, match="x needs memory of its own, got a Tensor of shape"):
            fp8core.quantize(x)


def test_what_torch_cannot_conjugate_has_no_conjugate_bit():
    for name in ("float32", "bfloat16", "uint8", "float8_e4m3fn"):
        x = torch.zeros(3, dtype=torch.float32).to(getattr(torch, name))
        assert not x.conj().is_conj()


# version counters


def test_writing_bumps_the_version_counters():
    x, y = torch.zeros(3), torch.zeros(2, 2)[1:]
    before = x._version, y._version
    torch_framework().wrote(
        (
            x,
            y,
        )
    )
    assert x._version > before[0]
    assert y._version > before[1]
    base = torch.zeros(4)
    torch_framework().wrote((base[:2],))
    assert base._version == 1, "a part shares the counter of the whole"


def test_autograd_sees_what_was_written():
    x = torch.ones(3, requires_grad=True)
    saved = torch.full((3,), 2.0)
    product = (x * saved).sum()
    torch_framework().wrote((saved,))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_writing_to_other_frameworks_notes_nothing():
    x = np.zeros(3)
    assert interop.framework_of(np.ndarray).wrote is None
    interop.wrote([x])
    assert (x == 0).all()


@pytest.mark.parametrize("increments", ["one tensor only", "no inference tensors"])
def test_older_counters_are_bumped_one_by_one(increments):
    from types import SimpleNamespace

    from fp8core.interop import torch_tensors

    bumped = []

    def increment(tensors):
        if increments == "one tensor only":
            if not isinstance(tensors, torch.Tensor):
                raise TypeError("expected a Tensor")
        elif isinstance(tensors, tuple):
            raise RuntimeError("inference tensors do not track version counter")
        bumped.append(tensors)

    older = SimpleNamespace(
        _C=SimpleNamespace(_increment_version=increment), inference_mode=torch.inference_mode, empty=torch.empty
    )
    with torch.inference_mode():
        uncounted = torch.zeros(2)
    x, y = torch.zeros(2), torch.zeros(3)
    torch_tensors._increment(older)((x, uncounted, y))
    assert [id(tensor) for tensor in bumped] == [id(x), id(y)]


# torch.compile


def test_compiled_functions_break_at_a_call_and_nothing_of_it_is_traced():
    program = """
        import sys
        import fp8core
        assert "torch" not in sys.modules
        from fp8core.core.operation import Operation
        from fp8core.interop import eager_only
        for function in (fp8core.quantize, fp8core.linear, fp8core.Fp8Linear.__call__, Operation.__call__):
            assert eager_only(function) is function
        import torch
        from torch._dynamo.utils import counters

        x, y = torch.randn(2, 16, 256).to(torch.bfloat16)
        w = torch.randn(64, 256).to(torch.bfloat16)

        def quantize(x):
            data, scale = fp8core.quantize(x * 2)
            return data.float() * scale + 1

        def linear(x):
            weight, scale = fp8core.quantize(w)
            return fp8core.linear(x + 1, weight, scale) * 2

        def through_layer(x):
            return layer(x + 1) * 2

        for function, breaks in ((quantize, 1), (linear, 2), (through_layer, 1)):
            if function is through_layer:
                layer = fp8core.Fp8Linear.from_weight(w)
            compiled = torch.compile(function, backend="eager")
            results = [compiled(x) for _ in range(3)]
            print(all(torch.equal(result, function(x)) for result in results), torch.equal(compiled(y), function(y)))
            print(len(counters["graph_break"]) == breaks and not counters["unimplemented"])
            counters.clear()
        compiled = torch.compile(fp8core.quantize, backend="eager")
        print(all(torch.equal(compiled(x).scale, fp8core.quantize(x).scale) for _ in range(3)))
    """
    assert run(program) == ["True"] * 10


@pytest.mark.parametrize("place", [0, 2])  # torch makes no nested tensors of FP8
def test_nested_tensors_of_the_size_of_others_are_refused(place):
    program = """
        import sys, torch, fp8core
        place = int(sys.argv[1])
        x = torch.ones(5, 64)
        operands = [x, torch.empty(5, 64, dtype=torch.float8_e4m3fn), torch.empty(5, 1)]
        for _ in range(3):
            fp8core.quantize(operands[0], out=tuple(operands[1:]))
        parts = [operands[place][:2].clone(), operands[place][2:].clone()]
        operands[place] = torch.nested.nested_tensor(parts)
        assert operands[place].nbytes == sum(part.nbytes for part in parts)
        try:
            fp8core.quantize(operands[0], out=tuple(operands[1:]))
        except fp8core.errors.LayoutError:
            print("refused")
        """
    assert run(program, str(place)) == ["refused"]


def test_a_storage_that_was_resized_to_fewer_bytes_is_refused():
    for keep in (0, 64, (15 * 24 + 8) * 4 - 1):
        x = torch.ones(16, 24)[:, :8]
        rest = x[8:]
        x.untyped_storage().resize_(keep)
        for part in (x, rest):
            with pytest.raises(LayoutError, match=r"x needs (a storage of|memory of its own)"):
                fp8core.quantize(part, stream=0)
    part = torch.ones(16, 24)[:4]
    part.untyped_storage().resize_(4 * 24 * 4)  # all that the part spans
    assert fp8core.quantize(part).data.shape == (4, 24)
    x = torch.ones(16, 0)
    x.untyped_storage().resize_(0)
    assert fp8core.quantize(x).data.shape == (16, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_child_makes_calls_that_was_forked_amid_the_test_of_the_guards():
    program = """
        import os, signal, threading, warnings
        import torch
        import fp8core
        from fp8core.interop import torch_tensors
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        tested, end, test = threading.Event(), threading.Event(), torch_tensors._guards
        def slow(torch):
            tested.set()
            end.wait()
            return test(torch)
        torch_tensors._guards = slow
        x = torch.ones(2, 32)
        thread = threading.Thread(target=fp8core.quantize, args=(x,))
        thread.start()
        tested.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # ends a child that waits for a thread of its parent
            end.set()
            fp8core.quantize(x)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        end.set()
        thread.join()
        """
    assert run(program) == ["0"]
