"""Models that accelerate has dispatched, and layers whose forward somebody has replaced."""

from weakref import ref

import pytest

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")

from torch import nn  # noqa: E402 - after the skips

from fp8core.errors import DeviceError  # noqa: E402
from fp8core.torch import Linear, dequantize_model_, quantize_model_, warm_up  # noqa: E402
from pytorch.tensors import bits  # noqa: E402


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 16)).eval()


def offloaded(model, tmp_path, where):
    if where == "cpu":
        return accelerate.cpu_offload(model, execution_device="cpu")
    return accelerate.disk_offload(model, tmp_path, execution_device="cpu")


both = pytest.mark.parametrize("where", ["cpu", "disk"])


@both
def test_an_offloaded_model_stays_as_it_is(model, tmp_path, where):
    x = torch.randn(3, 64)
    wanted = model(x)
    offloaded(model, tmp_path, where)
    report = quantize_model_(model)
    assert report.quantized == ()
    assert set(report.kept.values()) == {"accelerate has offloaded its weight: quantize before dispatching"}
    assert torch.equal(model(x), wanted)


@both
def test_quantized_layers_may_be_offloaded_and_are_not_dequantized_then(model, tmp_path, where):
    x = torch.randn(3, 64)
    quantize_model_(model)
    wanted = bits(model(x))
    offloaded(model, tmp_path, where)
    for _ in range(2):
        assert bits(model(x)) == wanted
    for refused in (dequantize_model_, warm_up):
        with pytest.raises(DeviceError, match="model needs its weights in memory, got 0 "):
            refused(model)
    assert bits(model(x)) == wanted
    assert isinstance(model[0], Linear)


@both
def test_a_weight_that_is_brought_for_a_call_is_gone_after_it(model, tmp_path, where, monkeypatch):
    quantize_model_(model)
    offloaded(model, tmp_path, where)
    product, brought = Linear._product, []

    def noted(layer, x):
        brought.append(ref(layer.weight))
        return product(layer, x)

    monkeypatch.setattr(Linear, "_product", noted)
    model(torch.randn(3, 64))
    assert [weight() for weight in brought] == [None, None]


class Counted(accelerate.hooks.ModelHook):
    """A hook in the place of those that bring inputs to a layer's device, of which a test without GPUs has one."""

    calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


def test_a_dispatched_model_is_quantized_where_it_is(model):
    x, places = torch.randn(3, 64), {"0": "cpu", "1": "cpu", "2": "cpu"}
    wanted = model(x)
    accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
    assert quantize_model_(model).quantized == ("0", "2")
    found = model(x)
    assert 0 < (found - wanted).norm() < 0.1 * wanted.norm()


def test_layers_keep_the_hooks_that_bring_their_inputs(model):
    x, hook = torch.randn(3, 64), Counted()
    accelerate.hooks.add_hook_to_module(model[2], hook)
    for change in (quantize_model_, dequantize_model_):
        change(model)
        before, wanted = hook.calls, bits(type(model[2]).forward(model[2], model[:2](x)))
        assert bits(model(x)) == wanted
        assert (model[2]._hf_hook, hook.calls) == (hook, before + 1)
    accelerate.hooks.remove_hook_from_module(model[2])
    assert bits(model(x)) == wanted


class Pair(nn.Sequential):
    """Layers that are brought and sent away by the hook of the module that holds them."""


def test_layers_that_the_hook_of_a_parent_brings_stay_as_they_are():
    model = nn.Sequential(Pair(nn.Linear(64, 32), nn.Linear(32, 64)), nn.Linear(64, 16)).eval()
    x = torch.randn(3, 64)
    wanted = model(x)
    accelerate.cpu_offload(model, execution_device="cpu", preload_module_classes=["Pair"])
    report = quantize_model_(model)
    assert (report.quantized, list(report.kept)) == ((), ["0.0", "0.1", "1"])
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("hooked", ["no", "before", "after"])
def test_a_layer_with_a_forward_of_its_own_stays(model, hooked):
    if hooked == "before":
        accelerate.hooks.add_hook_to_module(model[0], Counted())
    forward = model[0].forward
    model[0].forward = lambda x: 100 * forward(x)
    if hooked == "after":
        accelerate.hooks.add_hook_to_module(model[0], Counted())
    report = quantize_model_(model)
    assert (report.quantized, report.kept) == (("2",), {"0": "its forward is not that of torch.nn"})
