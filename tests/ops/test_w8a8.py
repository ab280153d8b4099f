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
    "rocm_per_tensor_w8a8_scaled_mm": "(*, qinput, weight, out_dtype, scale_a, scale_b, bias, input_2d, output_shape)",
    "torch_per_tensor_w8a8_scaled_mm": "(*, qinput, weight, out_dtype, scale_a, scale_b, bias, input_2d, output_shape)",
    "torch_per_token_w8a8_scaled_mm": "(*, qinput, weight, out_dtype, scale_a, scale_b, bias, input_2d, output_shape)",
    "torch_channelwise_w8a8_scaled_mm": "(*, qinput, weight, out_dtype, scale_a, scale_b, bias, input_2d, output_shape)",
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
def test_signatures(name):
    assert bare(inspect.signature(getattr(w8a8, name))) == NAMES[name]


def test_apply_has_the_arguments_that_callers_pass():
    assert bare(inspect.signature(w8a8.Fp8LinearOp.apply)) == APPLY


def test_constants_are_computed_on_first_access_and_true_of_this_device():
    assert w8a8.CUTLASS_FP8_SUPPORTED is w8a8.cutlass_fp8_supported()
    assert w8a8.CUTLASS_BLOCK_FP8_SUPPORTED is w8a8.cutlass_block_fp8_supported()
    assert w8a8.USE_ROWWISE_TORCH_SCALED_MM is False
    assert w8a8.maybe_create_device_identity() is None
    assert w8a8.cutlass_group_gemm_supported() is False
    assert w8a8.sparse_cutlass_supported() is False
    with pytest.raises(AttributeError, match="CUTLASS_INT4"):
        _ = w8a8.CUTLASS_INT4


@engines(*CUDA_FRAMEWORKS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("padding", [None, 17])
def test_scaled_fp8_quant(engine, per_token, padding):
    x = fresh((5, 128))
    data, scale = w8a8.scaled_fp8_quant(engine.array(x), num_token_padding=padding, use_per_token_if_dynamic=per_token)
    want = reference.quantize(x, group_shape=(1, -1) if per_token else (-1, -1), rows_padded=padding)
    assert_same_bytes(engine.codes(data), want.codes)
    assert_same_bytes(engine.numpy(scale).reshape(want.scale.shape), want.scale)


@engines(*CUDA_FRAMEWORKS)
def test_scaled_fp8_quant_static_into_given_memory(engine):
    x, scale = fresh((5, 128), "float16"), np.array([0.02], np.float32)
    out = engine.array(np.zeros((5, 128), ml_dtypes.float8_e4m3fn))
    data, returned = w8a8.scaled_fp8_quant(engine.array(x), engine.array(scale), output=out)
    assert data is out
    assert_same_bytes(engine.codes(out), reference.quantize(x, group_shape=(-1, -1), scale=scale).codes)
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
    x, weight, weight_scale = fresh((5, 128)), fresh_fp8((32, 128)), fresh_scale((1,))
    data, scale = w8a8.scaled_fp8_quant(engine.array(x), num_token_padding=17, use_per_token_if_dynamic=True)
    product = w8a8.dispatch_w8a8_scaled_mm(*flags)
    got = product(
        qinput=data,
        weight=engine.array(weight).T,
        out_dtype="bfloat16",
        scale_a=scale,
        scale_b=engine.array(weight_scale),
        bias=None,
        input_2d=engine.array(x),
        output_shape=[1, 5, 32],
    )
    q = reference.quantize(x)
    exact = reference.scaled_mm(
        reference.decode(q.codes, "float8_e4m3fn"), weight.astype(np.float32).T, q.scale, weight_scale
    )
    assert engine.numpy(got).shape == (1, 5, 32)
    assert reference.relative_error(engine.numpy(got)[0], exact) <= 3e-3


def test_the_weight_functions_are_the_library_s():
    for name in (
        "requantize_with_max_scale",
        "convert_to_channelwise",
        "per_tensor_dequantize",
        "all_close_1d",
        "normalize_e4m3fn_to_e4m3fnuz",
    ):
        assert getattr(w8a8, name) is getattr(fp8core, name)
