"""Calls inside of modes and transforms of torch, and with tensors of inference mode: refused, or as outside."""

import warnings

import pytest

import fp8core
from fp8core import interop
from fp8core.core import signature
from fp8core.errors import LayoutError
from fp8core.target import HOST
from support.probe import Probe
from support.torch_tensors import matrix, run, torch_framework

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 - after the skip
from torch._subclasses.functional_tensor import FunctionalTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


class PassingMode(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODES = {
    "FakeTensorMode": FakeTensorMode,
    "FunctionalTensorMode": FunctionalTensorMode,
    "PassingMode": PassingMode,
}


def vmap(call, x):
    torch.vmap(lambda row: (call(), row)[1])(x.float())


def grad(call, x):
    torch.func.grad(lambda row: (call(), row.sum())[1])(x.float())


def traced(call, x):
    def body(row):
        call()
        return row * 2

    with warnings.catch_warnings(action="ignore"):
        torch.jit.trace(body, x.float(), check_trace=False)


TRANSFORMS = {"vmap": vmap, "grad": grad, "torch.jit.trace": traced}


def inside(name, call, x):
    """Run ``call`` inside a mode or a transform."""
    if name in MODES:
        with MODES[name]():
            call()
    else:
        TRANSFORMS[name](call, x)


@pytest.fixture(params=[*MODES, *TRANSFORMS])
def mode(request):
    return request.param


def test_a_call_inside_of_a_mode_is_refused_and_writes_nothing(mode):
    x = matrix(4, 64)
    data, scale = torch.full((4, 64), 7, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.full((4, 1), 7.0)
    first = fp8core.quantize(x)
    calls = (
        lambda: fp8core.quantize(x),
        lambda: fp8core.quantize(x, out=(data, scale)),
        lambda: interop.view(x, "x"),
    )
    for call in calls[:2]:
        for _ in range(3):
            call()
    data.view(torch.uint8).fill_(7)
    scale.fill_(7.0)
    refused = []

    def attempt():
        for call in calls:
            with pytest.raises(LayoutError, match=r"x needs memory of its own, got a \w+ inside .*" + mode):
                call()
            refused.append(call)

    inside(mode, attempt, x)
    assert len(refused) == 3
    assert (data.view(torch.uint8) == 7).all()
    assert (scale == 7.0).all()
    again = fp8core.quantize(x)
    assert type(again.data) is torch.Tensor
    assert torch.equal(again.data.view(torch.uint8), first.data.view(torch.uint8))


def test_a_first_call_inside_of_a_mode_leaves_nothing_behind(mode):
    x = matrix(3, 96 + len(mode))
    refused = []

    def attempt():
        with pytest.raises(LayoutError, match="inside"):
            fp8core.quantize(x)
        assert signature.signature((x,))[1] is None
        refused.append(mode)

    inside(mode, attempt, x)
    assert refused
    for _ in range(3):
        data, scale = fp8core.quantize(x)
        assert type(data) is torch.Tensor
        assert torch.allclose(data.float() * scale, x.float(), rtol=0.07, atol=1e-4)


def test_results_are_not_allocated_inside_of_a_mode(mode):
    framework, found = torch_framework(), []
    kept = framework.allocator((4, 4), "float32", HOST)

    def attempt():
        for allocate in (
            lambda: framework.empty((4, 4), "float32", HOST),
            lambda: framework.allocator((4, 4), "float32", HOST),
            lambda: framework.scratch(16, HOST),
        ):
            with pytest.raises(LayoutError, match="a result needs memory, got none inside .*" + mode):
                allocate()
        found.append(mode)

    inside(mode, attempt, matrix())
    assert found
    pointer, array = kept(None)
    assert type(array) is torch.Tensor
    assert array.data_ptr() == pointer != 0


@pytest.mark.parametrize("strides", [None, (8, 1)])
@pytest.mark.parametrize("lenient", [False, True])
def test_an_allocator_gives_no_fake_memory(strides, lenient):
    kept = torch_framework().allocator((4, 4), "float32", HOST, strides)
    with (
        FakeTensorMode(allow_non_fake_inputs=lenient),
        warnings.catch_warnings(action="ignore"),
        pytest.raises(LayoutError, match="a result needs memory, got"),
    ):
        kept(None)


def test_shortcuts_hold_outside_of_modes_only(mode):
    x = matrix()
    run = Probe(2).shortcut(x, None)
    answers = []
    inside(mode, lambda: answers.append(run(x, None)), x)
    assert answers == [None]
    assert run(x, None)[1] == [x.data_ptr(), 0]


def test_a_shortcut_takes_one_tensor_in_two_places():
    x, y = matrix(), matrix()
    run = Probe(4).shortcut(x, None, y, x)
    assert run(x, None, y, x)[1] == [x.data_ptr(), 0, y.data_ptr(), x.data_ptr()]
    assert run(y, None, x, y)[1] == [y.data_ptr(), 0, x.data_ptr(), y.data_ptr()]
    assert run(x, None, y, y) is None
    assert run(x, None, y, matrix()) is None
    assert run(x, x, y, x) is None


def test_tensors_that_leave_a_transform_are_refused():
    kept = []
    torch.vmap(lambda row: (kept.append(row), row)[1])(matrix().float())
    with pytest.raises(LayoutError, match=r"x needs memory of its own, got a tensor of torch\.func's"):
        interop.view(kept[0], "x")


@pytest.mark.parametrize("context", ["FakeTensorMode()", "torch.inference_mode()"])
def test_torch_may_be_met_inside_of_a_mode(context):
    program = f"""
        import torch, fp8core
        from fp8core import interop
        from torch._subclasses.fake_tensor import FakeTensorMode
        x = torch.ones(4, 32)
        with {context}:
            try:
                fp8core.quantize(x)
            except fp8core.errors.LayoutError:
                print("refused")
        for _ in range(3):
            data, scale = fp8core.quantize(x)
        print(type(data) is torch.Tensor and not data.is_inference(), (data.float() * scale == 1).all().item())
        print(interop.framework_of(torch.Tensor).address is torch.Tensor.data_ptr)
    """
    assert run(program) == ["refused"] * ("Fake" in context) + ["True", "True", "True"]


def test_inference_tensors_are_tensors():
    with torch.inference_mode():
        x = matrix()
        data, _scale = fp8core.quantize(x)
        assert data.is_inference()
        out = torch.empty(4, 32, dtype=torch.float8_e4m3fn)
        fp8core.quantize(x, out=out)
        torch_framework().wrote((out,))
    assert not fp8core.quantize(x).data.is_inference()
    torch_framework().wrote((out,))


def test_an_allocator_made_in_inference_mode_gives_normal_tensors_outside():
    with torch.inference_mode():
        new = torch_framework().allocator((4, 4), "float32", HOST)
        assert new(None)[1].is_inference()
    assert not new(None)[1].is_inference()
