"""What errors say: the operand by the caller's name for it, dtypes that it takes, no shape that is needed and got."""

import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, Fp8Linear, w8a8
from support.engines import fresh, fresh_fp8, fresh_scale

X, WEIGHT = fresh((4, 256), "float32"), fresh((256, 256), "float32")
CODES, SCALE = fresh_fp8((256, 256)), fresh_scale((256, 1))
GROUPED = fp8core.quantize(X, group_shape=GROUP_128)
HALF = np.ones(1, np.float16)
FLOATS = "float32, float16, bfloat16"
FP8 = "float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz"


def of_w8a8(**changes):
    arguments = {
        "qinput": CODES[:4],
        "weight": CODES.T,
        "out_dtype": "float32",
        "scale_a": 1.0,
        "scale_b": 1.0,
        "bias": None,
        "output_shape": (4, 256),
        **changes,
    }
    return w8a8.cutlass_w8a8_scaled_mm(**arguments)


def applied(x=X, weight=CODES.T, weight_scale=SCALE, **options):
    return w8a8.Fp8LinearOp().apply(x, weight, weight_scale, **options)


SAID = {
    "channels of w8a8, which may stand or lie": (
        lambda: of_w8a8(scale_b=fresh_scale((255, 1))),
        fp8core.ShapeError,
        "needs shape (), (1,) or (1, 1) per tensor, (1, 256), (256,) or (256, 1) per channel, (2, 2) for blocks",
    ),
    "an output_shape of more rows than there are": (
        lambda: of_w8a8(output_shape=(5, 256)),
        fp8core.ShapeError,
        "output_shape needs at most 4 rows of 256 columns, got (5, 256)",
    ),
    "an output_shape of other columns": (
        lambda: of_w8a8(output_shape=(2, 2, 255)),
        fp8core.ShapeError,
        "output_shape needs at most 4 rows of 256 columns, got (2, 2, 255)",
    ),
    "a bias of neither dtype": (
        lambda: fp8core.linear(X, CODES, SCALE, bias=np.ones(256, np.float16)),
        fp8core.DTypeError,
        "bias needs float32, got float16",
    ),
    "groups of a beside channels": (
        lambda: fp8core.scaled_mm_nt(*GROUPED[:1], CODES, GROUPED.scale, SCALE),
        fp8core.ShapeError,
        (
            "scale_b for n=256, k=256 needs shape (2, 2) for blocks of 128x128 or (256, 2) for groups of 1x128, beside groups "
            "of 1x128 of the input, in the orientation of the stored weight [n, k], got (256, 1)"
        ),
    ),
    "groups of x beside channels": (
        lambda: fp8core.linear(X, CODES, SCALE, group_shape=GROUP_128),
        fp8core.ShapeError,
        "(256, 2) for groups of 1x128, beside groups of 1x128 of the input, in the orientation of the stored weight",
    ),
    "one number in the place of a layer's channels": (
        lambda: setattr(fp8core.Fp8Linear.from_weight(X), "weight_scale", 0.5),
        fp8core.ShapeError,
        (
            "weight_scale for n=4, k=256 needs shape (4, 1) or (4,) per channel, in the orientation of the stored weight "
            "[n, k], got (1,)"
        ),
    ),
    "a Quantized by groups beside channels": (
        lambda: fp8core.linear(GROUPED, fp8core.Quantized(CODES, SCALE, PER_TOKEN)),
        fp8core.ScaleError,
        "input_scale for groups of 1x128 needs weight_scale for 128x128 blocks or 1x128 groups, got one per channel",
    ),
    "blocks beside tokens": (
        lambda: fp8core.linear(X, CODES, fresh_scale((2, 2))),
        fp8core.ScaleError,
        (
            "weight_scale with one scale per 128x128 block needs the scale of x for groups of 1x128, "
            "with group_shape=(1, 128), got one per token"
        ),
    ),
    "blocks beside one token": (
        lambda: fp8core.linear(X[:1], CODES, fresh_scale((2, 2))),
        fp8core.ScaleError,
        "group_shape=(1, 128), got one per token",
    ),
    "blocks beside the tensor": (
        lambda: fp8core.linear(X, CODES, fresh_scale((2, 2)), group_shape=PER_TENSOR),
        fp8core.ScaleError,
        "group_shape=(1, 128), got one per tensor",
    ),
    "a layer of blocks beside tokens": (
        lambda: Fp8Linear.from_weight(WEIGHT, weight_group_shape=BLOCK_128),
        fp8core.ScaleError,
        (
            "weight_scale with one scale per 128x128 block needs the scale of x for groups of 1x128, "
            "with group_shape=(1, 128), got one per token"
        ),
    ),
    "a weight that is not FP8": (
        lambda: fp8core.linear(X, WEIGHT, SCALE),
        fp8core.DTypeError,
        f"weight needs an FP8 dtype ({FP8}), got float32",
    ),
    "x of float64": (
        lambda: fp8core.quantize(X.astype(np.float64)),
        fp8core.DTypeError,
        f"x needs an array of {FLOATS}, got float64",
    ),
    "a scale of float64": (
        lambda: fp8core.quantize(X, scale=np.ones(1)),
        fp8core.DTypeError,
        "scale needs an array of float32, float8_e8m0fnu, got float64",
    ),
    "a bias of float64": (
        lambda: fp8core.scaled_mm_nt(CODES, CODES, 1.0, 1.0, bias=np.ones(256)),
        fp8core.DTypeError,
        f"bias needs an array of {FLOATS}, got float64",
    ),
    "amax of float64": (
        lambda: fp8core.scaled_mm_nt(CODES, CODES, 1.0, 1.0, amax=np.ones(1)),
        fp8core.DTypeError,
        "amax needs an array of float32, got float64",
    ),
    "dtype float64": (
        lambda: fp8core.quantize(X, dtype="float64"),
        fp8core.DTypeError,
        f"dtype needs one of {FP8}, or a framework's dtype of that name, got 'float64'",
    ),
    "out_dtype of a layer": (
        lambda: fp8core.linear(X, CODES, SCALE, out_dtype="float8_e5m2"),
        fp8core.DTypeError,
        f"out_dtype needs one of {FLOATS}, or a framework's dtype of that name, got 'float8_e5m2'",
    ),
    "the weight of from_weight": (
        lambda: Fp8Linear.from_weight(WEIGHT.astype(np.float64)),
        fp8core.DTypeError,
        f"weight needs an array of {FLOATS}, got float64",
    ),
    "the weight of from_weight, FP8": (
        lambda: Fp8Linear.from_weight(CODES),
        fp8core.DTypeError,
        f"weight needs {FLOATS}, got float8_e4m3fn",
    ),
    "the scale of a layer": (
        lambda: Fp8Linear(CODES, fresh_scale((7, 1))),
        fp8core.ShapeError,
        "weight_scale for n=256, k=256 needs shape",
    ),
    "the scale of x in linear": (
        lambda: fp8core.linear(X, CODES, SCALE, input_scale=HALF),
        fp8core.DTypeError,
        "input_scale needs float32 or float8_e8m0fnu, got float16",
    ),
    "w8a8: x": (
        lambda: w8a8.scaled_fp8_quant(X.astype(np.float64)),
        fp8core.DTypeError,
        f"input needs an array of {FLOATS}, got float64",
    ),
    "w8a8: x, with a place": (
        lambda: w8a8.scaled_fp8_quant(X.astype(np.float64), output=CODES),
        fp8core.DTypeError,
        f"input needs an array of {FLOATS}, got float64",
    ),
    "w8a8: the place": (
        lambda: w8a8.scaled_fp8_quant(X, output=CODES),
        fp8core.ShapeError,
        "output needs shape (4, 256), got (256, 256)",
    ),
    "w8a8: padding of three axes": (
        lambda: w8a8.scaled_fp8_quant(X[None], num_token_padding=20),
        fp8core.ShapeError,
        "input needs two axes to be padded to 20 rows, got shape (1, 4, 256)",
    ),
    "w8a8: the weight of a product": (
        lambda: of_w8a8(weight=CODES),
        fp8core.LayoutError,
        "weight needs contiguous columns [k, n]",
    ),
    "w8a8: the input of a product": (
        lambda: of_w8a8(qinput=X),
        fp8core.DTypeError,
        f"qinput needs an FP8 dtype ({FP8}), got float32",
    ),
    "w8a8: the shared axis": (
        lambda: of_w8a8(qinput=CODES[:4, :128]),
        fp8core.ShapeError,
        "qinput and weight must share k",
    ),
    "a weight that is transposed": (
        lambda: fp8core.linear(X, CODES[:128].T, fresh_scale((256, 1))),
        fp8core.ShapeError,
        (
            "x and weight must share k, got x [..., k] of shape (4, 256) and weight [n, k] of shape (256, 128): the transpose of "
            "weight has k=256"
        ),
    ),
    "a stored weight in the place of its transpose": (
        lambda: fp8core.scaled_mm(CODES[:4], CODES[:128], 1.0, 1.0),
        fp8core.ShapeError,
        (
            "a and b must share k, got a [..., k] of shape (4, 256) and b [k, n] of shape (128, 256): the transpose of b has "
            "k=256"
        ),
    ),
    "another k": (
        lambda: fp8core.linear(X[:, :128], CODES[:64], fresh_scale((64, 1))),
        fp8core.ShapeError,
        "x and weight must share k, got x [..., k] of shape (4, 128) and weight [n, k] of shape (64, 256)",
    ),
    "a weight that nobody quantized": (
        lambda: fp8core.linear(X, WEIGHT),
        fp8core.ScaleError,
        "weight needs weight_scale or to be a Quantized, as quantize returns it, got neither",
    ),
    "codes as bytes": (
        lambda: fp8core.linear(X, CODES.view(np.uint8), 1.0),
        fp8core.DTypeError,
        f"weight needs an FP8 dtype ({FP8}), got uint8: fp8core.Float8Array gives bytes an FP8 dtype",
    ),
    "no weight": (lambda: fp8core.linear(X, None), fp8core.DTypeError, "weight needs an array, got None"),
    "no weight of a norm": (
        lambda: fp8core.rms_norm_quant(X, None, 1e-6),
        fp8core.DTypeError,
        "weight needs an array, got None",
    ),
    "no codes": (lambda: fp8core.dequantize(None), fp8core.DTypeError, "q needs an array, got None"),
    "no weight of a layer": (lambda: fp8core.Fp8Linear(None), fp8core.DTypeError, "weight needs an array, got None"),
    "a strided bias": (
        lambda: fp8core.linear(X, CODES, SCALE, bias=fresh((512,))[::2]),
        fp8core.LayoutError,
        "bias needs 256 contiguous elements, got shape (256,) with strides (2,)",
    ),
    "a strided weight of a norm": (
        lambda: fp8core.rms_norm_quant(X, fresh((512,))[::2], 1e-6),
        fp8core.LayoutError,
        "weight needs 256 contiguous elements, got shape (256,) with strides (2,)",
    ),
    "a weight of a norm of another length": (
        lambda: fp8core.rms_norm_quant(X, fresh((255,)), 1e-6),
        fp8core.ShapeError,
        "weight needs 256 contiguous elements, got shape (255,) with strides (1,)",
    ),
    "the result of a call in the place of its function": (
        lambda: fp8core.explain(X),
        TypeError,
        "or an fp8core.Fp8Linear, got numpy.ndarray",
    ),
    "w8a8: the weight of a layer": (
        lambda: applied(weight=WEIGHT.T),
        fp8core.DTypeError,
        f"weight needs an FP8 dtype ({FP8}), got float32",
    ),
    "w8a8: the scale of a layer's weight": (
        lambda: applied(weight_scale=HALF),
        fp8core.DTypeError,
        "weight_scale needs float32, got float16",
    ),
    "w8a8: no scale of a layer's weight": (
        lambda: applied(weight_scale=None),
        fp8core.DTypeError,
        "weight_scale needs an array, got None",
    ),
    "w8a8: the scale that a layer's input is quantized by": (
        lambda: applied(input_scale=HALF),
        fp8core.DTypeError,
        "input_scale needs float32 or float8_e8m0fnu, got float16",
    ),
    "w8a8: the scale of a layer's input": (
        lambda: applied(x=CODES[:4], input_scale=HALF),
        fp8core.DTypeError,
        "input_scale needs float32, got float16",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_errors_say_what_was_needed_and_got(case):
    call, error, words = SAID[case]
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


ONE_NUMBER = {
    "quantize scale": lambda s: fp8core.quantize(X, scale=s),
    "quantize scale_ub": lambda s: fp8core.quantize(X, scale_ub=s),
    "dequantize": lambda s: fp8core.dequantize(CODES, s),
    "per_tensor_dequantize": lambda s: fp8core.per_tensor_dequantize(CODES, s),
    "scaled_mm": lambda s: fp8core.scaled_mm(CODES, CODES.T, s, s),
    "scaled_mm out_scale": lambda s: fp8core.scaled_mm_nt(CODES, CODES, s, s, out_dtype="float8_e4m3fn", out_scale=s),
    "grouped_scaled_mm_nt": lambda s: fp8core.grouped_scaled_mm_nt(
        CODES, CODES[None], s, s, offs=np.full(1, 256, np.int32)
    ),
    "linear": lambda s: fp8core.linear(X, CODES, s, input_scale=s),
    "linear scale_ub": lambda s: fp8core.linear(X, CODES, s, scale_ub=s),
    "Fp8Linear": lambda s: Fp8Linear(CODES, s, input_scale=s)(X),
    "rms_norm_quant": lambda s: fp8core.rms_norm_quant(X, X[0], 1e-6, scale=s, group_shape=PER_TENSOR),
    "silu_and_mul_quant": lambda s: fp8core.silu_and_mul_quant(X, scale=s),
    "requantize_with_max_scale": lambda s: fp8core.requantize_with_max_scale(CODES.copy(), s, [256])[1],
    "normalize": lambda s: fp8core.normalize_e4m3fn_to_e4m3fnuz(CODES, s, s)[1].reshape(1),
    "w8a8 quantize": lambda s: w8a8.scaled_fp8_quant(X, s)[0],
    "w8a8 product": lambda s: of_w8a8(scale_a=s, scale_b=s),
    "w8a8 layer": lambda s: applied(weight_scale=s, input_scale=s),
}


def bytes_of(result):
    arrays = result if isinstance(result, tuple) else (result,)
    return [np.ascontiguousarray(x).tobytes() for x in arrays]


@pytest.mark.parametrize("function", ONE_NUMBER)
@pytest.mark.parametrize(
    "number", [0.5, np.float32(0.5), np.float64(0.5), np.array(0.5, np.float32)], ids=lambda n: type(n).__name__
)
def test_one_number_may_be_a_number_or_any_array_of_one(function, number):
    want = ONE_NUMBER[function](np.array([0.5], np.float32))
    assert bytes_of(ONE_NUMBER[function](number)) == bytes_of(want)


@pytest.mark.parametrize("function", ONE_NUMBER)
@pytest.mark.parametrize("wrong", ["a", [0.5], True], ids=str)
def test_what_is_no_number_and_no_array(function, wrong):
    with pytest.raises(
        fp8core.DTypeError, match=r"scale\w* needs a number or an array that offers DLPack, got builtins"
    ):
        ONE_NUMBER[function](wrong)
