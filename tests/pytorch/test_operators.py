"""The operators of fp8core in torch's dispatcher: their schemas, fake kernels, and calls of them."""

from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import fp8core.torch  # noqa: E402 - after the skip
from fp8core.core.scaling import default_eps  # noqa: E402
from fp8core.runtime import device  # noqa: E402
from fp8core.torch.operators import OVERLOADS  # noqa: E402
from pytorch.cases import CASES, fresh_dynamo  # noqa: E402, F401
from pytorch.tensors import K, bits, weight, wide  # noqa: E402
from support.targets import H200  # noqa: E402

WITH_FP8_INPUTS = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
"""What opcheck can do where an input is FP8: its test of the schema adds inputs up."""


def test_no_operator_writes_to_what_may_be_left_out():
    """inductor of torch 2.13 fails where nothing is written by an operator that may, and that has one result."""
    for overload in OVERLOADS.values():
        written = [a for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert not any(isinstance(a.type, torch.OptionalType) for a in written), overload


def recorded(case):
    """Return the operators that a case runs where torch exports without dynamo, each with copies of its arguments."""
    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in OVERLOADS.values():
                assert not kwargs
                calls.append((func, tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)))
            return func(*args, **(kwargs or {}))

    inputs = case.inputs(5)
    with mock.patch("torch.compiler.is_compiling", return_value=True), Recorder():
        got = case.function(*inputs)
    assert bits(got) == bits(case.function(*case.inputs(5)))
    return calls


def test_opcheck_of_every_overload():
    checked = set()
    for case in CASES:
        for overload, arguments in recorded(case):
            if overload in checked:
                continue
            checked.add(overload)
            fp8 = any(isinstance(x, torch.Tensor) and x.itemsize == 1 for x in arguments)
            tests = WITH_FP8_INPUTS if fp8 else ("test_schema", *WITH_FP8_INPUTS)
            done = torch.library.opcheck(overload, arguments, test_utils=tests)
            assert done == dict.fromkeys(tests, "SUCCESS"), (overload, done)
    assert checked == set(OVERLOADS.values())


def test_schemas_say_what_is_written():
    written = {
        name: [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        for name, overload in OVERLOADS.items()
    }
    assert written["quantize", ""] == []
    assert written["quantize", "out_scale"] == ["out", "scale"]
    assert written["rms_norm_quant", "static"] == written["scaled_mm", ""] == []
    assert written["rms_norm_quant", "static_residual"] == ["residual"]
    assert written["scaled_mm_nt", "out_amax"] == ["out", "amax"]
    assert written["grouped_scaled_mm_nt", ""] == []
    assert written["grouped_scaled_mm_nt", "out"] == ["out"]
    assert written["moe_permute", ""] == written["moe_permute", "scale"] == written["moe_unpermute", ""] == []
    assert written["moe_unpermute", "out"] == ["out"]
    assert written["requantize_with_max_scale", "inplace"] == ["weight"]


def test_operators_run_without_the_arguments_that_graphs_of_earlier_releases_lack():
    x, w, flags = wide(5, K), weight((1, -1)), (True, False, None, None)
    a = fp8core.quantize(x)
    operands = a.data, w.data, a.scale, w.scale, None, None
    made = torch.ops.fp8core.scaled_mm_nt(*operands, "bfloat16", *flags)
    assert bits(made) == bits(fp8core.scaled_mm_nt(a, w))
    operands = x, w.data, w.scale, None, None, None
    made = torch.ops.fp8core.linear(*operands, [1, -1], None, None, *flags)
    assert bits(made) == bits(fp8core.linear(x, w))


def test_an_operator_writes_in_place_where_another_operand_is_in_the_same_memory():
    def operands():
        weight = torch.arange(32 * 16, dtype=torch.int32).view(32, 16).to(torch.uint8) % 100
        scales = weight.view(torch.float32)[0, :2]
        scales.copy_(torch.tensor([0.5, 2.0]))
        return weight.view(torch.float8_e4m3fn), scales

    requantize = torch.ops.fp8core.requantize_with_max_scale.inplace
    (weight, scales), (wanted, apart) = operands(), operands()
    requantize(wanted, apart.clone(), [16, 16])
    assert requantize(weight, scales, [16, 16]).item() == 2.0
    assert bits(weight) == bits(wanted) != bits(operands()[0])


def test_an_operator_raises_an_error_of_other_operands_once():
    x, residual = wide(5, K), wide(5, K).requires_grad_()
    norm = torch.ones(K, dtype=x.dtype)
    with pytest.raises(fp8core.LayoutError, match="residual needs a tensor that does not require grad") as caught:
        torch.ops.fp8core.rms_norm_quant.residual(
            x, norm, residual, None, "float8_e4m3fn", [1, -1], None, "float32", "k", default_eps(), 1e-6, False
        )
    assert caught.value.__context__ is None


def test_fake_kernels_describe_calls_on_a_gpu_that_is_not_there(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    asked = []

    def target(ordinal):
        asked.append(ordinal)
        return H200._replace(device=ordinal)

    monkeypatch.setattr(device, "target", target)
    with FakeTensorMode():
        x = torch.empty(3, 5, 256, dtype=torch.bfloat16, device="cuda:1")
        w = torch.empty(64, 256, dtype=torch.float8_e4m3fn, device="cuda:1")
        scales = torch.empty(1, 2, device="cuda:1")
        options = "float8_e4m3fn", [1, 128], None, "float32", "mn", 1e-10, None
        data, scale = torch.ops.fp8core.quantize(x, None, *options)
        assert (data.shape, data.dtype, data.device) == (x.shape, torch.float8_e4m3fn, x.device)
        assert (scale.shape, scale.stride(), scale.device) == ((3, 5, 2), (5, 1, 15), x.device)
        arguments = None, None, None, [1, 128], None, "float16", True, False, None, None
        y = torch.ops.fp8core.linear(x, w, scales, *arguments)
        assert (y.shape, y.dtype, y.device) == ((3, 5, 64), torch.float16, x.device)
        with pytest.raises(fp8core.DeviceError, match="weight needs to be where x is"):
            torch.ops.fp8core.linear(x, torch.empty(64, 256, dtype=torch.float8_e4m3fn), scales, *arguments)
        experts, offs = torch.stack([w, w]), torch.empty(2, dtype=torch.int32, device="cuda:1")
        flat, ones = data.view(15, 256), torch.empty(1, device="cuda:1")
        y = torch.ops.fp8core.grouped_scaled_mm_nt(flat, experts, ones, ones, None, offs, "float32", True, None, None)
        assert (y.shape, y.dtype, y.device) == ((15, 64), torch.float32, x.device)
        with pytest.raises(fp8core.DeviceError, match="offs needs to be where a is"):
            torch.ops.fp8core.grouped_scaled_mm_nt(
                flat, experts, ones, ones, None, offs.cpu(), "float32", True, None, None
            )
    assert set(asked) == {1}


@pytest.mark.parametrize("name", ["weight", "weight_scale", "bias", "x"])
def test_a_tensor_without_memory_beside_others_is_refused(name):
    """torch runs the fake kernel where one tensor is on the meta device: the result was memory that nobody wrote."""
    layer, x = fp8core.torch.Linear.from_linear(torch.nn.Linear(K, 64)), wide(5, K, dtype=torch.float32)
    if name == "x":
        x = x.to("meta")
    else:
        setattr(layer, name, torch.nn.Parameter(getattr(layer, name).to("meta"), requires_grad=False))
    words = f"{name} needs memory of a CUDA or ROCm device or the CPU, got meta"
    with pytest.raises(Exception, match=words):
        torch.compile(layer, fullgraph=True, backend="eager")(x)
    with pytest.raises(fp8core.DeviceError, match=words):
        torch.export.export(layer, (x,))
    with pytest.raises(fp8core.DeviceError, match=words):
        layer(x)
    operands = x, layer.weight, layer.weight_scale, layer.bias
    with pytest.raises(fp8core.DeviceError, match=words):
        torch.ops.fp8core.linear(*operands, None, None, [1, -1], None, None, True, False, None, None)


def test_a_layer_without_any_memory_is_traced():
    layer = fp8core.torch.Linear(K, 64, device="meta")
    assert torch.compile(layer, fullgraph=True, backend="eager")(wide(5, K).to("meta")).is_meta
