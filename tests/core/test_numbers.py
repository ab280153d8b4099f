"""Group shapes and numbers among the arguments: what may stand for them, and that all else is refused by their names."""

import pytest

import fp8core
from fp8core import Fp8Linear, w8a8
from support.engines import fresh, fresh_fp8, fresh_scale

X, WEIGHT = fresh((4, 256), "float32"), fresh((256, 256), "float32")
CODES, SCALE = fresh_fp8((256, 256)), fresh_scale((256, 1))


NO_PAIR = [128, "token", (1, 2, 3), (1.5, 2), (0, 1), ("a", "b"), (1,), [[1], 2], {}, Ellipsis, None]
GROUPS = {
    "quantize": lambda g: fp8core.quantize(X, group_shape=g),
    "rms_norm_quant": lambda g: fp8core.rms_norm_quant(X, X[0], 1e-6, group_shape=g),
    "silu_and_mul_quant": lambda g: fp8core.silu_and_mul_quant(X, group_shape=g),
    "linear": lambda g: fp8core.linear(X, CODES, SCALE, group_shape=g),
    "Fp8Linear": lambda g: Fp8Linear(CODES, SCALE, group_shape=g),
    "from_weight": lambda g: Fp8Linear.from_weight(WEIGHT, weight_group_shape=g),
    "dequantize": lambda g: fp8core.dequantize(CODES, SCALE, group_shape=g),
    "Quantized": lambda g: fp8core.Quantized(CODES, SCALE, g),
}


@pytest.mark.parametrize("group_shape", NO_PAIR, ids=str)
@pytest.mark.parametrize("function", GROUPS)
def test_what_is_no_group_shape(function, group_shape):
    if group_shape is None and function in ("dequantize", "Quantized"):
        assert GROUPS[function](group_shape) is not None  # there it is "not known"
        return
    with pytest.raises(fp8core.ShapeError, match="group_shape needs a pair of whole numbers, each -1 or 1 to 2"):
        GROUPS[function](group_shape)


@pytest.mark.parametrize("function", GROUPS)
def test_a_group_shape_may_be_a_list(function):
    assert GROUPS[function]([1, -1]) is not None


NUMBERS = {
    "eps": (lambda n: fp8core.quantize(X, eps=n), fp8core.ScaleError, [-1, float("nan"), 1e39]),
    "epsilon": (lambda n: fp8core.rms_norm_quant(X, X[0], n), fp8core.ShapeError, [-1.0, float("nan")]),
    "rows_padded": (
        lambda n: fp8core.quantize(X, rows_padded=n),
        fp8core.ShapeError,
        [20.5, "a", [8], 1 << 31, 10**20],
    ),
    "num_token_padding": (
        lambda n: w8a8.scaled_fp8_quant(X, num_token_padding=n),
        fp8core.ShapeError,
        [20.5, "a", [8], 1 << 31, 10**20],
    ),
    "logical_widths": (
        lambda n: fp8core.requantize_with_max_scale(CODES.copy(), 1.0, n),
        fp8core.ShapeError,
        [[128.5, 127.5], ["a"], None, 5, [[256]]],
    ),
    "out": (lambda n: fp8core.quantize(X, out=n), fp8core.ShapeError, [(), (CODES,), (CODES, None, None)]),
}


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, w) for name, (*_, values) in NUMBERS.items() for w in values], ids=str
)
def test_a_wrong_argument_is_refused_by_its_name(name, wrong):
    call, error, _ = NUMBERS[name]
    with pytest.raises(error, match=f"^{name} needs .*, got "):
        call(wrong)
