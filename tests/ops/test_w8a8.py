"""`fp8core.w8a8`: the names, the signatures and the behaviour that users of vLLM's module rely on."""

import inspect

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core import w8a8
from support import reference
from support.engines import assert_same_bytes, engines, fresh, fresh_fp8, fresh_scale

NAMES = {
    "Fp8LinearOp": "(cutlass_fp8_supported=None, use_per_token_if_dynamic=False, pad_output=None)",
    "dispatch_w8a8_scaled_mm": "(cutlass_fp8_supported, per_tensor_weights, per_tensor_activations, use_per_token_if_dynamic=None)",
    "scaled_fp8_quant": "(input, scale=None, num_token_padding=None, scale_ub=None, use_per_token_if_dynamic=False, output=None, group_shape=None)",
    "rocm_per_tensor_w8a8_scaled_mm": "(*, qinput, weight, out_dtype, scale_a, scale_b, bias, input_2d=None, output_shape)",
    "torch_per_tensor_w8a8_scaled_mm": "(*, qinput, weight, out_dtype, scale_a, scale_b, bias, input_2d=None, output_shape)",
    "torch_per_token_w8a8_scaled_mm": "(*, qinput, weight, out_dtype, scale_a, scale_b, bias, input_2d=None, output_shape)",
    "torch_channelwise_w8a8_scaled_mm": "(*, qinput, weight, out_dtype, scale_a, scale_b, bias, input_2d=None, output_shape)",
    "maybe_create_device_identity": "()",
    "cutlass_fp8_supported": "()",
    "cutlass_block_fp8_supported": "()",
    "cutlass_group_gemm_supported": "()",
    "sparse_cutlass_supported": "()",
}
APPLY = "(self, input, weight, weight_scale, out_dtype=None, input_scale=None, input_scale_ub=None, bias=None, use_per_token_if_dynamic=None)"
CUDA_FRAMEWORKS = ("numpy", "torch-cpu", "cupy", "torch-cuda")


def bare(signature):
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(parameters))


@pytest.mark.parametrize("name", NAMES)
def test_functions_have_the_parameters_of_vllms(name):
    assert bare(inspect.signature(getattr(w8a8, name))) == NAMES[name]


def test_apply_has_the_arguments_that_callers_pass():
    assert bare(inspect.signature(w8a8.Fp8LinearOp.apply)) == APPLY


def test_constants_are_computed_on_first_access_and_true_of_this_device():
    assert w8a8.CUTLASS_FP8_SUPPORTED is w8a8.cutlass_fp8_supported()
    assert w8a8.CUTLASS_BLOCK_FP8_SUPPORTED is w8a8.cutlass_block_fp8_supported()
    assert w8a8.USE_ROWWISE_TORCH_SCALED_MM is False
    assert w8a8.maybe_create_device_identity() is None
    assert w8a8.cutlass_group_gemm_supported() is True
    assert w8a8.sparse_cutlass_supported() is False
    with pytest.raises(AttributeError, match="CUTLASS_INT4"):
        _ = w8a8.CUTLASS_INT4


@pytest.mark.parametrize(
    ("missing", "functions"),
    [
        ("scaled_mm_per_tensor", {"cutlass_fp8_supported"}),
        ("scaled_mm_per_token", {"cutlass_fp8_supported"}),
        ("scaled_mm_block", {"cutlass_block_fp8_supported"}),
        ("grouped_mm", {"cutlass_group_gemm_supported"}),
    ],
)
def test_what_is_supported_is_what_the_device_is_capable_of(monkeypatch, missing, functions):
    able = fp8core.capabilities()
    monkeypatch.setattr(w8a8, "capabilities", lambda: {**able, missing: able[missing]._replace(able=False)})
    names = [name for name in NAMES if name.endswith("_supported") and name != "sparse_cutlass_supported"]
    assert {name for name in names if not getattr(w8a8, name)()} == functions
    for name in ("cutlass_fp8_supported", "cutlass_block_fp8_supported"):
        w8a8._computed.cache_clear()
        assert getattr(w8a8, name.upper()) is (name not in functions)
    w8a8._computed.cache_clear()


@engines(*CUDA_FRAMEWORKS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("padding", [None, 17])
def test_scaled_fp8_quant(engine, per_token, padding):
    x = fresh((5, 128))
    data, scale = w8a8.scaled_fp8_quant(engine.array(x), num_token_padding=padding, use_per_token_if_dynamic=per_token)
    want = reference.quantize(x, group_shape=(1, -1) if per_token else (-1, -1), rows_padded=padding)
    assert_same_bytes(engine.codes(data), want.codes)
    assert_same_bytes(engine.numpy(scale).reshape(want.scale.shape), want.scale)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_ub": 1.0},
        {"use_per_token_if_dynamic": True},
        {"group_shape": (1, 128), "use_per_token_if_dynamic": True},
    ],
    ids=str,
)
def test_options_of_dynamic_scales_are_ignored_beside_a_given_scale(options):
    """Also one per token, or of other groups than per token."""
    x, scale = fresh((4, 128)), fresh_scale((4, 1))
    want = fp8core.quantize(x, scale=scale)
    for got, one in zip(w8a8.scaled_fp8_quant(x, scale, **options), want, strict=True):
        np.testing.assert_array_equal(got.astype("float32"), one.astype("float32"))


def test_new_data_have_the_format_that_the_device_multiplies(monkeypatch):
    monkeypatch.setattr(w8a8.quantization, "native_e4m3", lambda target: "float8_e4m3fnuz")
    assert w8a8.scaled_fp8_quant(fresh((4, 128)))[0].dtype.name == "float8_e4m3fnuz"


@engines(*CUDA_FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_scaled_fp8_quant_static_into_given_memory(engine, dtype):
    x, scale = fresh((5, 128), "float16"), np.array([0.02], np.float32)
    out = engine.array(np.zeros((5, 128), dtype))
    data, returned = w8a8.scaled_fp8_quant(engine.array(x), engine.array(scale), output=out)
    assert data is out
    assert_same_bytes(engine.codes(out), reference.quantize(x, dtype, (-1, -1), scale=scale).codes)
    assert_same_bytes(engine.numpy(returned), scale)


@engines(*CUDA_FRAMEWORKS)
@pytest.mark.parametrize("shape", [(1, 256), (7, 256), (2, 3, 256), (0, 256)], ids=str)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("ready", [False, True])
def test_linear_op_on_every_path(engine, shape, per_token, channels, static, biased, ready):
    n = 64
    x = fresh(shape, spread=1)
    weight = fresh_fp8((n, 256))
    weight_scale = fresh_scale((n, 1)) if channels else fresh_scale((1,))
    bias = fresh((n,), spread=0) if biased else None
    input_scale = np.array([0.05], np.float32)
    q = reference.quantize(
        x.reshape(-1, 256),
        group_shape=(1, -1) if per_token and not (static or ready) else (-1, -1),
        scale=input_scale if static or ready else None,
    )
    exact = reference.scaled_mm(
        reference.decode(q.codes, "float8_e4m3fn"),
        weight.astype(np.float32).T,
        q.scale,
        weight_scale.reshape(1, -1),
        bias,
    )
    given = engine.array(q.codes.reshape(shape).view(ml_dtypes.float8_e4m3fn)) if ready else engine.array(x)
    op = w8a8.Fp8LinearOp(use_per_token_if_dynamic=per_token)
    got = op.apply(
        given,
        engine.array(weight).T,
        engine.array(weight_scale),
        input_scale=engine.array(input_scale) if static or ready else None,
        input_scale_ub=engine.array(np.array([1e9], np.float32)),
        bias=None if bias is None else engine.array(bias),
    )
    result = engine.numpy(got)
    assert result.shape == (*shape[:-1], n)
    assert result.dtype == ml_dtypes.bfloat16
    assert reference.relative_error(result.reshape(-1, n), exact.reshape(-1, n)) <= 3e-3


@engines("numpy", "torch-cpu", "torch-cuda")
@pytest.mark.parametrize(
    "flags",
    [(True, True, True, None), (False, True, True, False), (False, False, False, True), (False, False, True, False)],
)
def test_dispatch_drops_padding_rows(engine, flags):
    x, weight, weight_scale, bias = fresh((5, 128)), fresh_fp8((32, 128)), fresh_scale((1,)), fresh((32,), "float32")
    data, scale = w8a8.scaled_fp8_quant(engine.array(x), num_token_padding=17, use_per_token_if_dynamic=True)
    product = w8a8.dispatch_w8a8_scaled_mm(*flags)
    assert (product is w8a8.cutlass_w8a8_scaled_mm) == flags[0]
    got = product(
        qinput=data,
        weight=engine.array(weight).T,
        out_dtype="bfloat16",
        scale_a=scale,
        scale_b=engine.array(weight_scale),
        bias=engine.array(bias),
        input_2d=engine.array(x),
        output_shape=[1, 5, 32],
    )
    q = reference.quantize(x)
    exact = reference.scaled_mm(
        reference.decode(q.codes, "float8_e4m3fn"), weight.astype(np.float32).T, q.scale, weight_scale
    )
    assert engine.numpy(got).shape == (1, 5, 32)
    assert reference.relative_error(engine.numpy(got)[0], exact + bias) <= 3e-3


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e5m2fnuz"])
def test_linear_op_quantizes_inputs_of_an_e5m2_weight_to_e4m3(dtype):
    """As `linear` does: no product multiplies e5m2 by e5m2, so the operation could not take such a weight."""
    w, x = fp8core.quantize(fresh((8, 32), "float32"), dtype=dtype), fresh((4, 32), "float32")
    got = w8a8.Fp8LinearOp(use_per_token_if_dynamic=True).apply(x, w.data.T, w.scale)
    np.testing.assert_array_equal(got, fp8core.linear(x, w))


def test_the_weight_functions_are_the_library_s():
    for name in ("all_close_1d", "convert_to_channelwise"):
        assert getattr(w8a8, name) is getattr(fp8core, name)
    for name in ("requantize_with_max_scale", "per_tensor_dequantize", "normalize_e4m3fn_to_e4m3fnuz"):
        assert bare(inspect.signature(getattr(w8a8, name))) == bare(inspect.signature(getattr(fp8core, name)))


# scales that are numbers

NUMBERS = [0.5, 3, np.float32(0.1), np.float64(0.1), np.float16(0.25), np.int64(2), float("nan")]


def both(engine, number, call):
    """Return the bytes of what a call gives of a number and of an array of it, results one by one."""
    array = engine.array(np.array([number], np.float32))
    given = []
    for scale in (number, array):
        result = call(scale)
        given.append([engine.numpy(x) for x in (result if isinstance(result, tuple) else (result,)) if x is not None])
    for got, want in zip(*given, strict=True):
        assert got.dtype == want.dtype
        assert_same_bytes(
            got.view(np.uint8) if got.itemsize == 1 else got, want.view(np.uint8) if want.itemsize == 1 else want
        )


@engines(*CUDA_FRAMEWORKS, "jax-cpu", "jax-cuda")
@pytest.mark.parametrize("number", NUMBERS, ids=lambda x: f"{type(x).__name__} {x}")
def test_a_scale_may_be_a_number(engine, number):
    q, x, shards = fresh_fp8((6, 128)), fresh((6, 128)), [2, 4]
    both(engine, number, lambda scale: w8a8.per_tensor_dequantize(engine.array(q), scale))
    both(engine, number, lambda scale: w8a8.scaled_fp8_quant(engine.array(x), scale))
    both(engine, number, lambda scale: w8a8.scaled_fp8_quant(engine.array(x), scale, use_per_token_if_dynamic=True))
    both(engine, number, lambda scale: w8a8.requantize_with_max_scale(engine.array(q), scale, shards))
    both(engine, number, lambda scale: w8a8.normalize_e4m3fn_to_e4m3fnuz(engine.array(q), scale, scale))


@engines(*CUDA_FRAMEWORKS)
@pytest.mark.parametrize("number", [0.25, np.float32(0.1)], ids=str)
def test_scales_of_products_may_be_numbers(engine, number):
    x, weight = fresh((5, 128), spread=1), engine.array(fresh_fp8((32, 128))).T
    data, scale = w8a8.scaled_fp8_quant(engine.array(x), number)

    def product(scale_a, scale_b):
        return w8a8.dispatch_w8a8_scaled_mm(True, True, True)(
            qinput=data,
            weight=weight,
            out_dtype="bfloat16",
            scale_a=scale_a,
            scale_b=scale_b,
            bias=None,
            input_2d=None,
            output_shape=[5, 32],
        )

    both(engine, number, lambda scale_a: product(scale_a, scale))
    both(engine, number, lambda scale_b: product(scale, scale_b))
    op = w8a8.Fp8LinearOp()
    both(engine, number, lambda weight_scale: op.apply(engine.array(x), weight, weight_scale))
    both(engine, number, lambda input_scale: op.apply(engine.array(x), weight, scale, input_scale=input_scale))
    both(engine, number, lambda input_scale: op.apply(data, weight, scale, input_scale=input_scale))


@pytest.mark.gpu
def test_a_number_is_recorded_in_a_graph_and_written_on_the_stream():
    torch = pytest.importorskip("torch")
    q = torch.from_numpy(fresh_fp8((64, 128)).view(np.uint8)).cuda().view(torch.float8_e4m3fn)
    want = w8a8.per_tensor_dequantize(q, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = w8a8.per_tensor_dequantize(q, 0.5)
    for _ in range(3):
        got.fill_(7)
        graph.replay()
        assert torch.equal(got, want)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    there = w8a8.per_tensor_dequantize(q, 0.5, stream=side)
    side.synchronize()
    assert torch.equal(there, want)
