"""What a graph refuses, in the words of ordinary calls."""

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fp8core.torch  # noqa: E402 - after the skip
from fp8core import w8a8  # noqa: E402
from fp8core.errors import DeviceError, LayoutError, ScaleError  # noqa: E402
from fp8core.torch import tracing  # noqa: E402
from pytorch.cases import fresh_dynamo  # noqa: E402, F401
from pytorch.tensors import K, bits, ends, stacked, weight, wide  # noqa: E402

NARROW = weight((1, -1), k=128)
CODES = weight((1, -1))
EXPERTS = fp8core.Quantized(*stacked((1, -1)), fp8core.PER_CHANNEL)
ROUTES = torch.arange(10).view(5, 2) % 3
LARGEST_FIRST = np.dtype(">f4")
HALF, EIGHT, NO = np.float64(0.5), np.int64(8), np.bool_(0)


def grouped(x, **keywords):
    return fp8core.grouped_scaled_mm_nt(fp8core.quantize(x), **{"weight": EXPERTS, "offs": ends(5, 5), **keywords})


def operator_of_quantize(x):
    return torch.ops.fp8core.quantize(x, None, "float8_e4m3fn", [1, -1], None, "float32", "k", 1e-10, None)


def raised(words):
    """Return a pattern of an error in a message of torch.compile, which also shows the line that was traced."""
    return rf"Error\(.*{words}"


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda x: fp8core.quantize(x, scale_ub=1.0, group_shape=(1, 128)), ScaleError, "scale_ub needs group_shape"),
        (lambda x: fp8core.quantize(x, group_shape=(0, 3)), fp8core.ShapeError, "group_shape needs a pair"),
        (lambda x: fp8core.linear(x, CODES, group_shape=(1.9, -1)), fp8core.ShapeError, "group_shape needs a pair"),
        (lambda x: fp8core.linear(x, CODES, group_shape=("1", "-1")), fp8core.ShapeError, "group_shape needs a pair"),
        (
            lambda x: fp8core.dequantize(CODES.data, CODES.scale, group_shape=(1, -1.5)),
            fp8core.ShapeError,
            "group_shape needs a pair",
        ),
        (lambda x: fp8core.linear(x, CODES, use_fast_accum=None), fp8core.DTypeError, "use_fast_accum needs True or F"),
        (
            lambda x: fp8core.linear(x, CODES, batch_invariant=2),
            fp8core.DTypeError,
            "batch_invariant needs True or Fal",
        ),
        (
            lambda x: fp8core.silu_and_mul_quant(x, round_intermediate=None),
            fp8core.DTypeError,
            "round_intermediate needs True or False",
        ),
        (lambda x: fp8core.quantize(x.double()), fp8core.DTypeError, "x needs an array of float32, float16, bfloat16"),
        (lambda x: fp8core.linear(x, NARROW), fp8core.ShapeError, "must share k"),
        (lambda x: grouped(x[:, :128].contiguous()), fp8core.ShapeError, "must share k"),
        (
            lambda x: grouped(x, weight=CODES),
            fp8core.ShapeError,
            r"weight needs three axes \[groups, n, k\], got shape",
        ),
        (lambda x: grouped(x, offs=ends(5, 5).long()), fp8core.DTypeError, "offs needs .*int32, got (torch.)?int64"),
        (lambda x: grouped(x, offs=ends(5, 5)[1:]), fp8core.ShapeError, r"offs needs shape \(3,\), .* got \(2,\)"),
        (lambda x: grouped(x, offs=None), fp8core.DTypeError, "offs needs an array, got None"),
        (lambda x: grouped(x, offs=ends(9, 9).repeat(2)[::2]), LayoutError, "offs needs contiguous memory"),
        (lambda x: grouped(x, bias=x[0, :64]), fp8core.ShapeError, r"bias needs shape \(3, 64\), one row per group"),
        (lambda x: grouped(x, out_dtype="float8_e4m3fn"), fp8core.DTypeError, "out_dtype needs one of float32"),
        (lambda x: grouped(x, out=x.new_ones(4, 64)), fp8core.ShapeError, r"out needs shape \(5, 64\)"),
        (lambda x: grouped(x, use_fast_accum=None), fp8core.DTypeError, "use_fast_accum needs True or F"),
        (
            lambda x: grouped(x, weight=EXPERTS.data, scale_b=x[:2, 0].float()),
            fp8core.ShapeError,
            "scale_b needs one num",
        ),
        (lambda x: fp8core.moe_permute(x, ROUTES, -1), fp8core.ShapeError, "experts needs a whole number from 0"),
        (lambda x: fp8core.moe_permute(x, ROUTES, 2.5), fp8core.ShapeError, "experts needs a whole number from 0"),
        (lambda x: fp8core.moe_permute(x, ROUTES.float(), 3), fp8core.DTypeError, "topk_ids needs int32 or int64, got"),
        (lambda x: fp8core.moe_permute(x, ROUTES[1:], 3), fp8core.ShapeError, r"topk_ids needs shape \(5, k\), a row"),
        (lambda x: fp8core.moe_permute(x, ROUTES.T.contiguous().T, 3), LayoutError, "topk_ids needs contiguous"),
        (lambda x: fp8core.moe_permute(x[0], ROUTES, 3), fp8core.ShapeError, r"x needs two axes \[tokens, cols\]"),
        (
            lambda x: fp8core.moe_permute(fp8core.quantize(x, group_shape=(128, 128)), ROUTES, 3),
            ScaleError,
            "x needs scales per tensor, per token or by groups of 1xg, got group_shape",
        ),
        (lambda x: fp8core.moe_unpermute(x, ROUTES), fp8core.DTypeError, "inverse needs int32, got int64"),
        (lambda x: fp8core.moe_unpermute(x, None), fp8core.DTypeError, "inverse needs an array, got None"),
        (lambda x: fp8core.moe_unpermute(None, x), fp8core.DTypeError, "y needs an array, got None"),
        (lambda x: fp8core.moe_unpermute(x, ROUTES.int(), x), fp8core.ShapeError, r"topk_weights needs shape \(5, 2\)"),
        (
            lambda x: fp8core.moe_unpermute(x, ROUTES.int(), out=x.new_ones(4, K)),
            fp8core.ShapeError,
            r"out needs shape \(5, 256\)",
        ),
        (
            lambda x: fp8core.moe_unpermute(x, ROUTES.int(), out_dtype=torch.float8_e5m2),
            fp8core.DTypeError,
            "out_dtype needs",
        ),
        *(
            (function, error, f"{name} needs a .*number .*that float32 holds")
            for name, error, function in (
                ("scale", ScaleError, lambda x: fp8core.quantize(x, scale=10**400)),
                ("scale_ub", ScaleError, lambda x: fp8core.quantize(x, scale_ub=10**400)),
                ("scale_ub", ScaleError, lambda x: fp8core.silu_and_mul_quant(x, scale_ub=-(10**400))),
                ("eps", ScaleError, lambda x: fp8core.quantize(x, group_shape=(1, 64), eps=10**400)),
                ("epsilon", fp8core.ShapeError, lambda x: fp8core.rms_norm_quant(x, x[0], 10**400)),
            )
        ),
        (lambda x: fp8core.quantize(x, dtype="half"), fp8core.DTypeError, "dtype needs one of float8_e4m3fn,"),
        (lambda x: fp8core.quantize(x, dtype=LARGEST_FIRST), fp8core.DTypeError, "dtype needs one of float8_e4m3fn,"),
        (lambda x: CODES.dequantize(torch.int8), fp8core.DTypeError, "dtype needs one of float32,"),
        (lambda x: fp8core.linear(x, CODES, out_dtype=3), fp8core.DTypeError, "out_dtype needs one of float32,"),
        (lambda x: fp8core.quantize(x, dtype=None), fp8core.DTypeError, "dtype needs one of float8_e4m3fn,"),
        (lambda x: fp8core.quantize(x, rows_padded=0.5), fp8core.ShapeError, "rows_padded needs a whole number"),
        (lambda x: fp8core.rms_norm_quant(x, x[0], True), fp8core.DTypeError, "epsilon needs a number, got bool"),
        (lambda x: fp8core.quantize(x, scale=1e39), ScaleError, "scale needs a number that float32 holds, got 1e\\+39"),
    ],
)
def test_refusals_keep_their_words(function, error, words):
    x = wide(5, K)
    with pytest.raises(error, match=words):
        function(x)
    with pytest.raises(Exception, match=raised(words)) as caught:
        torch.compile(function, fullgraph=True, backend="eager")(x)
    assert not isinstance(caught.value, AssertionError)


def test_a_layer_in_a_graph_refuses_the_groups_of_its_input_before_any_eager_call():
    layer = fp8core.Fp8Linear.from_weight(
        torch.ones(128, 192), weight_group_shape=fp8core.BLOCK_128, group_shape=fp8core.GROUP_128
    )

    def call(x):
        return layer(fp8core.quantize(x, group_shape=(1, 96)))  # with as many scales as groups of 1x128

    x, words = wide(5, 192), r"needs one of the group shapes .*, got \(1, 96\)"
    with pytest.raises(Exception, match=raised(words)):
        torch.compile(call, fullgraph=True, backend="eager")(x)
    with pytest.raises(ScaleError, match=words):
        call(x)


def vllm_product(a, b, **scales):
    given = {"scale_a": 1.0, "scale_b": 1.0, **scales}
    return w8a8.cutlass_w8a8_scaled_mm(
        qinput=a, weight=b, out_dtype=torch.bfloat16, bias=None, output_shape=(len(a), b.shape[1]), **given
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: w8a8.scaled_fp8_quant(x[0, 0]), "input needs at least one axis"),
        (lambda x: w8a8.scaled_fp8_quant(x, output=CODES.data[:1]), "output needs shape"),
        (lambda x: w8a8.scaled_fp8_quant(x, 1e39), "scale needs a number that float32 holds"),
        (lambda x: vllm_product(x, CODES.data.T), "qinput needs an FP8 dtype"),
        (lambda x: vllm_product(CODES.data, x.T), "weight needs an FP8 dtype"),
        (lambda x: vllm_product(CODES.data, CODES.data.T, scale_a=x[:, :3].float()), "scale_a for m="),
        (lambda x: w8a8.Fp8LinearOp().apply(x[:, :-1], CODES.data.T, 1.0), "input and weight must share k"),
        (lambda x: w8a8.Fp8LinearOp().apply(x, CODES.data.T, x[:3, :3].float()), "weight_scale for n="),
        (lambda x: w8a8.Fp8LinearOp().apply(x, CODES.data.T, 1e39), "weight_scale needs a number that float32"),
        (
            lambda x: w8a8.Fp8LinearOp().apply(x, CODES.data.T, 1.0, input_scale=x[0, :3].float()),
            "input_scale of input",
        ),
        (lambda x: fp8core.quantize(x[0, 0]), "x needs at least one axis"),
    ],
)
def test_refusals_of_a_graph_name_the_operands_of_the_function(function, words):
    x = wide(5, K)
    with pytest.raises(fp8core.Fp8Error, match=words):
        function(x)
    with pytest.raises(Exception, match=raised(words)):
        torch.compile(function, fullgraph=True, backend="eager")(x)
    with pytest.raises(Exception, match="x needs at least one axis"):  # names of another call are not left behind
        operator_of_quantize(x.to("meta")[0, 0])


def test_refusals_of_a_thread_name_the_operands_of_its_own_function():
    with ThreadPoolExecutor(1) as other:
        other.submit(tracing.tracing, "quantize", 1).result()  # as a call of fp8core.w8a8 does, before its operator
    with pytest.raises(Exception, match="x needs at least one axis"):
        operator_of_quantize(wide(5, K).to("meta")[0, 0])


@pytest.mark.parametrize("eight", [8.0, Fraction(8), 8 + 0j], ids=repr)
def test_whole_numbers_in_a_graph_may_be_of_any_type(eight):
    def counted(x):
        padded = fp8core.quantize(x, group_shape=(eight / eight, 64.0), rows_padded=eight).scale
        return padded, fp8core.moe_permute(x, ROUTES, eight).offs

    x = wide(5, K)
    assert bits(torch.compile(counted, fullgraph=True, backend="eager")(x)) == bits(counted(x))


def test_a_stream_is_refused_in_a_graph_and_taken_beside_it():
    def on_stream(x):
        return fp8core.quantize(x * 2, stream=0).scale

    x = wide(5, K)
    with pytest.raises(Exception, match="stream needs to be left out while torch traces"):
        torch.compile(on_stream, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    assert bits(torch.compile(on_stream, backend="eager")(x)) == bits(on_stream(x))
    assert issubclass(DeviceError, ValueError)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("scale", lambda x: fp8core.quantize(x, scale=HALF).scale),
        ("scale", lambda x: fp8core.quantize(x, scale=np.float32(HALF)).scale),
        ("scale", lambda x: fp8core.dequantize(CODES.data, HALF)),
        ("scale_ub", lambda x: fp8core.quantize(x, group_shape=(1, -1), scale_ub=HALF).scale),
        ("group_shape", lambda x: fp8core.quantize(x, group_shape=(1, EIGHT)).scale),
        ("rows_padded", lambda x: fp8core.quantize(x, rows_padded=EIGHT).data),
        ("eps", lambda x: fp8core.quantize(x, group_shape=(1, 128), eps=HALF).scale),
        ("epsilon", lambda x: fp8core.rms_norm_quant(x, torch.ones_like(x[0]), HALF).scale),
        ("use_fast_accum", lambda x: fp8core.linear(x, CODES, use_fast_accum=NO)),
        ("experts", lambda x: fp8core.moe_permute(x, ROUTES, EIGHT).offs),
        ("input_scale", lambda x: fp8core.linear(x, CODES, input_scale=HALF)),
    ],
)
def test_numbers_of_numpy_are_refused_in_a_graph_and_taken_beside_it(name, function):
    x = wide(5, K)
    wanted = function(x)
    with pytest.raises(Exception, match=f"{name} needs a Python number while torch traces"):
        torch.compile(function, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    got = torch.compile(function, backend="eager")(x)
    assert type(got) is torch.Tensor
    assert bits(got) == bits(wanted)


@pytest.mark.parametrize("dtype", [np.dtype(ml_dtypes.float8_e5m2), ml_dtypes.float8_e5m2], ids=repr)
def test_dtypes_of_numpy_in_a_graph(dtype):
    def quantized(x):
        return fp8core.quantize(x, dtype=dtype).data

    x = wide(5, K)
    assert bits(torch.compile(quantized, fullgraph=True, backend="eager")(x)) == bits(quantized(x))


def test_numbers_of_numpy_are_constants_of_an_export():
    class Quantize(torch.nn.Module):
        def forward(self, x):
            return fp8core.quantize(x, scale=HALF, rows_padded=EIGHT).data, fp8core.moe_permute(x, ROUTES, EIGHT).offs

    x = wide(5, K)
    program = torch.export.export(Quantize(), (x,), strict=False)
    assert bits(program.module()(x)) == bits(Quantize()(x))


def test_vmap_in_a_graph_is_a_call_for_each_and_refused_beside_it():
    w = weight((1, -1))
    x = torch.stack([wide(5, K, seed=seed) for seed in range(3)])
    mapped = torch.vmap(lambda one: fp8core.linear(one, w))
    got = torch.compile(mapped, fullgraph=True, backend="aot_eager")(x)
    assert bits(got) == bits(torch.stack([fp8core.linear(one, w) for one in x]))
    offs = torch.stack([ends(5, 5), ends(9, 9), ends(0, 5)])
    got = torch.compile(torch.vmap(lambda x, offs: grouped(x, offs=offs)), fullgraph=True, backend="aot_eager")(x, offs)
    assert bits(got) == bits(torch.stack([grouped(one, offs=of) for one, of in zip(x, offs, strict=True)]))
    with pytest.raises(LayoutError, match=r"x needs memory of its own, got a Tensor inside torch.func's vmap"):
        mapped(x)


@pytest.mark.parametrize("kind", ["layer", "grouped"])
def test_layers_in_vmap_in_a_graph_lose_no_gradient(kind):
    """There neither the input nor anything else says that gradients are wanted, so that a layer passed none."""
    linear = torch.nn.Linear(K, K, dtype=torch.bfloat16)
    layer = fp8core.torch.Linear.from_linear(linear)
    experts = fp8core.torch.GroupedLinear.from_weight(linear.weight.detach()[None])
    whole = torch.tensor([5], dtype=torch.int32)
    x = torch.stack([wide(5, K, seed=seed) for seed in range(3)])

    def call(one):
        return one + (layer(one) if kind == "layer" else experts(one, whole))

    with pytest.raises(Exception, match=r"x needs to be outside of torch.vmap, .* or inside of torch.no_grad"):
        torch.compile(torch.vmap(call), fullgraph=True, backend="aot_eager")(x.clone().requires_grad_())
    with pytest.raises(LayoutError, match=r"x needs memory of its own, got .* inside torch.func's vmap"):
        torch.vmap(call)(x)
    with torch.no_grad():
        got = torch.compile(torch.vmap(call), fullgraph=True, backend="aot_eager")(x)
    assert bits(got) == bits(torch.stack([call(one) for one in x]))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
@pytest.mark.parametrize("kind", ["function", "layer", "grouped"])
def test_derivatives_of_torch_func_are_refused_and_not_zero(transform, kind):
    w = weight((1, -1))
    layer = fp8core.torch.Linear.from_linear(torch.nn.Linear(K, 8, dtype=torch.bfloat16))
    call = {"layer": layer, "function": lambda x: fp8core.linear(x, w), "grouped": grouped}[kind]
    derivative = transform(lambda x: call(x).float().sum())
    with pytest.raises(Exception, match=r"x needs to be outside of torch.func's (grad|jvp)"):
        torch.compile(derivative, fullgraph=True, backend="eager")(wide(1, K))
    with pytest.raises((LayoutError, RuntimeError)):
        derivative(wide(1, K))


def test_a_trace_gets_names_of_operands_as_plain_strings(monkeypatch):
    """Of a subclass of str, dynamo of torch 2.11, the oldest that is supported, makes no constant, nor formats it."""
    names, made = [], tracing._array
    monkeypatch.setattr(tracing, "_refused_derivative", lambda name: names.append(name))
    monkeypatch.setattr(tracing, "_array", lambda x, first, name: names.append(name) or made(x, first, name))

    class Both(torch.nn.Module):
        def forward(self, x):
            return fp8core.quantize(x, scale=0.5).data, fp8core.linear(x, CODES, input_scale=0.5)

    torch.export.export(Both(), (wide(5, K),), strict=False)
    assert {(name, type(name)) for name in names} >= {("x", str), ("scale", str), ("input_scale", str)}
    assert {type(name) for name in names} == {str}
