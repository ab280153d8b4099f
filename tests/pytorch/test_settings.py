"""What a layer and a traced call take beside tensors: options that change, numbers, and torch's default dtype."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the skip

import fp8core  # noqa: E402
from fp8core.errors import DTypeError, ScaleError, ShapeError  # noqa: E402
from fp8core.ops.grouped_mm import GROUPED_MM_CALLS, GroupedOptions  # noqa: E402
from fp8core.ops.linear import LINEAR_CALLS, LinearOptions  # noqa: E402
from fp8core.torch import GroupedLinear, Linear, quantize_model_, warm_up  # noqa: E402


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
    ("kind", "name"), [(Linear, "batch_invariant"), (Linear, "use_fast_accum"), (GroupedLinear, "use_fast_accum")]
)
def test_an_option_that_is_changed_counts_from_the_next_call_on(kind, name, value, monkeypatch):
    x, seen = torch.randn(5, 64), []
    if kind is Linear:
        layer, calls, fields = Linear.from_linear(nn.Linear(64, 32), **{name: value}), LINEAR_CALLS, LinearOptions
        operands = (x,)
    else:
        layer = GroupedLinear.from_weight(torch.randn(1, 32, 64), **{name: value})
        operands, calls, fields = (x, torch.tensor([5], dtype=torch.int32)), GROUPED_MM_CALLS, GroupedOptions

    def described(specs, options, describe=calls.describe):
        seen.append(fields(*options)._asdict()[name])
        return describe(specs, options)

    calls.forget()
    monkeypatch.setattr(calls, "describe", described)
    layer(*operands)
    setattr(layer, name, not value)
    layer(*operands)
    assert seen == [value, not value]
    setattr(layer, name, "yes")
    with pytest.raises(DTypeError, match=f"{name} needs True or False"):
        layer(*operands)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torch_s_default_dtype_is_that_of_no_scale(dtype):
    linear, x = nn.Linear(64, 32), torch.randn(5, 64)
    want = Linear.from_linear(linear, input_scale=0.5)(x)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        layer = Linear.from_linear(linear, input_scale=0.5)
        assert {name: p.dtype for name, p in layer.named_parameters() if "scale" in name} == {
            "weight_scale": torch.float32,
            "input_scale": torch.float32,
        }
        assert torch.equal(layer(x), want)
        quantize = torch.compile(lambda x: fp8core.quantize(x, scale=0.3).scale, backend="eager", fullgraph=True)
        assert quantize(x).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (1, {}),
        (5, {"group_shape": (1, 64)}),
        (5, {"group_shape": (-1, -1)}),
        (1, {"scale": 0.5}),
        (5, {"scale": torch.tensor([0.5])}),
        (5, {"scale": torch.ones(5, 2), "group_shape": [1, 64]}),
    ],
)
def test_a_quantized_of_a_graph_has_the_group_shape_of_an_eager_one(rows, options):
    def quantize(x):
        q = fp8core.quantize(x, **options)
        return q.data, (q.group_shape.rows, q.group_shape.cols)

    x = torch.randn(rows, 128)
    assert torch.compile(quantize, backend="eager", fullgraph=True)(x)[1] == quantize(x)[1]


@pytest.mark.parametrize("number", [1e39, -1e39, 1e-60])
def test_a_number_that_float32_does_not_hold_is_refused_in_a_graph_too(number):
    run = torch.compile(lambda x: fp8core.quantize(x, scale=number).scale, backend="eager")
    with pytest.raises(ScaleError, match="scale needs a number that float32 holds"):
        run(torch.randn(5, 64))


@pytest.mark.parametrize("number", [0.0, 1e-45, float("inf")])
def test_any_other_number_is_taken_in_a_graph(number):
    run = torch.compile(lambda x: fp8core.quantize(x, scale=number).scale, backend="eager", fullgraph=True)
    assert run(torch.randn(5, 64)).item() == torch.tensor(number).item()


WIDE = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", WIDE)
def test_a_layer_knows_the_dtype_of_the_model_it_came_from(dtype, bias):
    linear = nn.Linear(64, 32, bias, dtype=dtype)
    layer = Linear.from_linear(linear)
    with torch.device("meta"):
        waiting = Linear.from_linear(nn.Linear(64, 32, bias, dtype=dtype))
    made = {"quantized": layer, "copied": copy.deepcopy(layer), "from meta": waiting.to_empty(device="cpu")}
    made["constructed"] = Linear(64, 32, bias, dtype=dtype)
    for one in made.values():
        assert one.compute_dtype == dtype
        assert {parameter.dtype for parameter in one.to_linear().parameters()} == {dtype}
        for cast in WIDE:
            assert one.to(cast).compute_dtype == cast
            assert one.to_linear()(torch.ones(2, 64, dtype=cast)).dtype == cast
    assert layer.compute_dtype == torch.bfloat16  # the last of them


@pytest.mark.parametrize("dtype", WIDE)
def test_layers_are_warmed_up_with_inputs_of_their_dtype(dtype):
    model, seen = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8, bias=False)).to(dtype), []
    quantize_model_(model)
    for layer in model:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    warm_up(model, rows=[1])
    assert seen == [dtype] * 2
    warm_up(model.half(), rows=[1], dtype=torch.float16)
    assert seen[2:] == [torch.float16] * 2


@pytest.mark.parametrize("rows", [5, None, "16", [-1], [1.5], [1 << 31], [10**20], [None], torch.tensor(5)], ids=repr)
def test_rows_to_warm_up_with_are_whole_numbers(rows):
    model, called = nn.Sequential(nn.Linear(64, 32)), []
    quantize_model_(model)
    model[0].register_forward_pre_hook(lambda *_: called.append(1))
    with pytest.raises(ShapeError, match=r"rows needs whole numbers from 0 to 2\*\*31 - 1, got "):
        warm_up(model, rows=rows)
    assert not called


@pytest.mark.parametrize("extent", [-1, 1.5, "32", None, [32], 1 << 31, 10**20], ids=repr)
@pytest.mark.parametrize("name", ["in_features", "out_features"])
def test_features_are_whole_numbers(name, extent):
    with pytest.raises(ShapeError, match=rf"{name} needs a whole number from 0 to 2\*\*31 - 1, got "):
        Linear(**{"in_features": 64, "out_features": 32, name: extent})


@pytest.mark.parametrize("dtype", ["float16", np.float16, 16], ids=repr)
@pytest.mark.parametrize("make", [lambda d: Linear(4, 4, False, dtype=d), lambda d: GroupedLinear(2, 4, 4, dtype=d)])
def test_a_dtype_is_one_of_torch(make, dtype):
    """A layer without a bias has no tensor of it that torch would refuse; a later cast of the model would fail."""
    with pytest.raises(DTypeError, match=r"dtype needs a torch\.dtype, got "):
        make(dtype)


@pytest.mark.parametrize("make", [lambda s: Linear(4, 4, static=s), lambda s: GroupedLinear(2, 4, 4, static=s)])
def test_whether_inputs_are_static_is_true_or_false(make):
    assert make(np.True_).input_scale is not None
    assert make(0).input_scale is None
    with pytest.raises(DTypeError, match="static needs True or False, got 'no'"):
        make("no")


def test_features_may_be_numbers_of_numpy():
    layer = Linear(np.int64(64), np.int32(32))
    assert layer(torch.ones(2, 64)).shape == (2, 32)
    assert (type(layer.in_features), type(layer.out_features)) == (int, int)


@pytest.mark.parametrize("scale", [0.5, 2, np.float64(0.5), np.int64(2), np.array(0.5), torch.tensor(0.5)])
def test_a_static_scale_is_a_number_of_python_numpy_or_torch(scale):
    model = nn.Sequential(nn.Linear(64, 32))
    wanted = Linear.from_linear(model[0], input_scale=float(scale)).input_scale
    assert torch.equal(Linear.from_linear(model[0], input_scale=scale).input_scale, wanted)
    quantize_model_(model, input_scales={"0": scale})
    assert torch.equal(model[0].input_scale, wanted)


NO_SCALES = [0.0, -1.0, float("nan"), float("inf"), 1e-60, 1e39, 10**400, "0.5", True, np.True_, torch.tensor(-1.0)]


@pytest.mark.parametrize("scale", NO_SCALES)
def test_a_static_scale_is_a_number_above_0_that_float32_has(scale):
    with pytest.raises(ScaleError, match="input_scale needs a number above 0 that float32 holds, got"):
        Linear.from_linear(nn.Linear(64, 32), input_scale=scale)
    model = nn.Sequential(nn.Linear(64, 32))
    with pytest.raises(ScaleError, match=r"input_scales needs numbers above 0 that float32 holds, got .* for '0'"):
        quantize_model_(model, input_scales={"0": scale})
    assert type(model[0]) is nn.Linear
