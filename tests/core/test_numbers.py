"""Group shapes and numbers among the arguments: what may stand for them, and that all else is refused by their names."""

from math import inf

import numpy as np
import pytest

import fp8core
from fp8core import Fp8Linear, w8a8
from fp8core.core import checks
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
    "epsilon": (
        lambda n: fp8core.rms_norm_quant(X, X[0], n),
        fp8core.ShapeError,
        [-1.0, float("nan"), 1e-60, 1e39, inf],
    ),
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
        [[128.5, 127.5], ["a"], None, 5, [[256]], {100, 156}, {100: 1, 156: 1}, b"\x80\x80", {256}],
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


@pytest.mark.parametrize(
    ("check", "least", "most"),
    [
        (lambda n: checks.extent(n, "it"), 0, 2**31 - 1),
        (lambda n: checks.extents((n,), "it")[0], 0, 2**31 - 1),
        (lambda n: checks.extents((7, n), "it", 3)[1], 3, 2**31 - 1),
        (lambda n: checks.least_rows(n, "it"), None, 2**31 - 1),
        (lambda n: checks.group_shape((n, 1), "it").rows, 1, 2**31 - 1),
        (lambda n: checks.group_shape((1, n), "it").cols, 1, 2**31 - 1),
    ],
    ids=["extent", "extents", "extents from 3", "rows", "rows of groups", "columns of groups"],
)
def test_the_bounds_of_whole_numbers(check, least, most):
    below = [] if least is None else [least - 1]
    for number in (-7 if least is None else least, 5, most, 5.0, np.int64(most)):
        assert check(number) == number
        assert type(check(number)) is int
    for number in (most + 1, 5.5, "5", None, np.array([5]), *below):
        with pytest.raises(fp8core.ShapeError, match=r"^it needs"):
            check(number)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"])
def test_the_bounds_of_eps(dtype):
    least = {"float8_e4m3fn": 448, "float8_e4m3fnuz": 224, "float8_e5m2": 57344}[dtype] * 2.0**-126
    for eps in (least, checks.LARGEST_FLOAT32):
        fp8core.quantize(X, dtype=dtype, group_shape=(1, 128), eps=eps)
    for eps in (np.nextafter(least, 0), np.nextafter(checks.LARGEST_FLOAT32, inf), inf):
        with pytest.raises(fp8core.ScaleError, match=r"^eps needs a number that float32 holds"):
            fp8core.quantize(X, dtype=dtype, group_shape=(1, 128), eps=eps)


def test_the_default_of_eps_may_be_a_number_of_float32():
    for group in ((-1, -1), (1, -1)):
        fp8core.quantize(X, group_shape=group, eps=np.float32(1e-10))
        with pytest.raises(fp8core.ScaleError, match=r"^eps needs a group_shape"):
            fp8core.quantize(X, group_shape=group, eps=2e-10)


def test_a_list_with_what_is_no_whole_number_is_not_one_of_the_others():
    assert checks.whole_numbers([1, 2.0, True]) == (1, 2, 1)
    assert checks.whole_numbers([1, 2.5, 3]) is None
    assert checks.whole_numbers(5) is None


@pytest.mark.parametrize(
    ("number", "rounded"),
    [
        (2.0**128 - 2.0**103, inf),
        (np.nextafter(2.0**128 - 2.0**103, 0), 3.4028234663852886e38),
        (2.0**-150, 0.0),
        (np.nextafter(2.0**-150, 1), 2.0**-149),
        (0.0, 0.0),
        (inf, inf),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_in_float32_are_those_that_it_rounds_to_numbers(number, rounded, sign):
    with np.errstate(over="ignore"):
        assert np.float32(sign * number) == sign * rounded
    assert checks.in_float32(float(sign * number)) == (rounded not in (0, inf) or number == rounded)


@pytest.mark.parametrize("name", [["k"], {}, b"k", 1, np.array(["k", "mn"])], ids=repr)
def test_what_is_no_string_is_no_name(name):
    with pytest.raises(fp8core.LayoutError, match=r"^scale_layout needs 'k' or 'mn', got"):
        fp8core.quantize(X, scale_layout=name)


FLAGS = {
    "use_fast_accum": {
        "scaled_mm_nt": lambda flag: fp8core.scaled_mm_nt(CODES, CODES, 1.0, 1.0, use_fast_accum=flag),
        "grouped": lambda flag: fp8core.grouped_scaled_mm_nt(
            *(CODES, CODES[None], 1.0, 1.0), offs=np.array([256], np.int32), use_fast_accum=flag
        ),
        "linear": lambda flag: fp8core.linear(X, CODES, SCALE, use_fast_accum=flag),
        "Fp8Linear": lambda flag: Fp8Linear(CODES, SCALE, use_fast_accum=flag),
    },
    "batch_invariant": {
        "scaled_mm_nt": lambda flag: fp8core.scaled_mm_nt(CODES, CODES, 1.0, 1.0, batch_invariant=flag),
        "linear": lambda flag: fp8core.linear(X, CODES, SCALE, batch_invariant=flag),
        "from_weight": lambda flag: Fp8Linear.from_weight(WEIGHT, batch_invariant=flag),
    },
    "round_intermediate": {
        "rms_norm_quant": lambda flag: fp8core.rms_norm_quant(X, X[0], 1e-6, round_intermediate=flag),
        "silu_and_mul_quant": lambda flag: fp8core.silu_and_mul_quant(X, round_intermediate=flag),
    },
}


@pytest.mark.parametrize("wrong", ["yes", 2, None, -1, [True], inf], ids=repr)
@pytest.mark.parametrize(("flag", "function"), [(flag, name) for flag, calls in FLAGS.items() for name in calls])
def test_what_is_no_flag(flag, function, wrong):
    with pytest.raises(fp8core.DTypeError, match=f"^{flag} needs True or False, got"):
        FLAGS[flag][function](wrong)
