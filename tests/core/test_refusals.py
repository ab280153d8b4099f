"""Every refusal: the right exception, the operand and what was needed in its words, nothing launched or written."""

from decimal import Decimal
from fractions import Fraction
from numbers import Number

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN
from fp8core.core.operation import forget
from support.engines import BOTH, engines, fresh, fresh_fp8, fresh_scale

ONE = np.ones(1, np.float32)


def windows(shape, strides):
    """Return a float32 array some of whose elements may be one."""
    return np.lib.stride_tricks.as_strided(np.ones(64, np.float32), shape, [4 * stride for stride in strides])


def amax_in_bias(at):
    """Return a bias, and an amax that is one of its elements."""
    bias = np.ones(32, np.float32)
    return {"bias": bias, "amax": bias[at : at + 1]}


def product(**changes):
    """Return the arguments of a good product, with changes."""
    return {
        "a": fresh_fp8((4, 64)),
        "b": fresh_fp8((32, 64)).T,
        "scale_a": ONE,
        "scale_b": ONE,
        **changes,
    }


QUANTIZE = {
    "x is FP8 already": (lambda: {"x": fresh_fp8((2, 16))}, fp8core.DTypeError, "x needs"),
    "x is integers": (lambda: {"x": np.ones((2, 16), np.int32)}, fp8core.DTypeError, "x"),
    "x is 0-d": (lambda: {"x": np.ones((), np.float32)}, fp8core.ShapeError, "x needs at least one axis"),
    "x has strided columns": (lambda: {"x": fresh((4, 32))[:, ::2]}, fp8core.LayoutError, "x needs a contiguous last"),
    "x has reversed rows": (lambda: {"x": fresh((4, 32))[::-1]}, fp8core.LayoutError, "x needs rows in ascending"),
    "x does not fold": (lambda: {"x": fresh((2, 4, 6, 16))[:, :, :3]}, fp8core.LayoutError, "fold"),
    "dtype is no FP8": (lambda: {"dtype": "float16"}, fp8core.DTypeError, "dtype"),
    "dtype is unknown": (lambda: {"dtype": "float7"}, fp8core.DTypeError, "float7"),
    "group of zero": (lambda: {"group_shape": (0, 128)}, fp8core.ShapeError, "group_shape"),
    "group of more rows than an int": (lambda: {"group_shape": (2**32 + 2, 64)}, fp8core.ShapeError, r"1 to 2\*\*31"),
    "group of more columns than an int": (lambda: {"group_shape": (1, 2**31)}, fp8core.ShapeError, r"1 to 2\*\*31"),
    "scale of the wrong shape": (lambda: {"scale": np.ones((3, 1), np.float32)}, fp8core.ShapeError, r"\(4, 1\)"),
    "scale of the wrong dtype": (lambda: {"scale": np.ones(1, np.float16)}, fp8core.DTypeError, "scale needs float32"),
    "scale_ub with a given scale": (lambda: {"scale": ONE, "scale_ub": 1.0}, fp8core.ScaleError, "scale_ub"),
    "scale_ub per tensor": (lambda: {"group_shape": PER_TENSOR, "scale_ub": 1.0}, fp8core.ScaleError, "per token"),
    "scale_ub negative": (lambda: {"scale_ub": -1.0}, fp8core.ScaleError, "positive"),
    "eps of zero": (lambda: {"group_shape": GROUP_128, "eps": 0.0}, fp8core.ScaleError, "eps"),
    "eps per token": (lambda: {"group_shape": PER_TOKEN, "eps": 1e-5}, fp8core.ScaleError, r"eps.*1e-05 for \(1, -1\)"),
    "eps per tensor": (lambda: {"group_shape": PER_TENSOR, "eps": 1e-5}, fp8core.ScaleError, "eps needs a group_shape"),
    "eps with a given scale": (lambda: {"scale": ONE, "eps": 1e-5}, fp8core.ScaleError, "eps needs to be left out"),
    "a format with a given scale": (
        lambda: {"scale": ONE, "scale_format": "ue8m0"},
        fp8core.ScaleError,
        "scale_format needs to be left out where a scale is given and kept as it is, got 'ue8m0'",
    ),
    "scale_format unknown": (lambda: {"scale_format": "e4m3"}, fp8core.ScaleError, "scale_format"),
    "scale_layout unknown": (lambda: {"scale_layout": "nm"}, fp8core.LayoutError, "scale_layout"),
    "scale_layout with a given scale": (
        lambda: {"scale": 1.0, "scale_layout": "mn"},
        fp8core.LayoutError,
        "scale_layout needs to be left out where a scale is given, got 'mn'",
    ),
    "scale_layout of an array for scales by rows": (
        lambda: {"group_shape": (1, 16), "scale_layout": "mn", "out": (None, np.ones((4, 4), np.float32))},
        fp8core.LayoutError,
        r"scale needs contiguous columns for scale_layout 'mn', got strides \(4, 1\)",
    ),
    "out of the wrong shape": (lambda: {"out": fresh_fp8((4, 65))}, fp8core.ShapeError, r"out needs shape \(4, 64\)"),
    "out of the wrong dtype": (lambda: {"out": fresh_fp8((4, 64), "float8_e5m2")}, fp8core.DTypeError, "out needs"),
    "scale_ub in an array with a given scale": (
        lambda: {"scale": ONE, "scale_ub": ONE},
        fp8core.ScaleError,
        "scale_ub",
    ),
    "scale_ub that no float holds": (lambda: {"scale_ub": 10**400}, fp8core.ScaleError, "scale_ub needs .*float32"),
    "eps below that of the format": (
        lambda: {"dtype": "float8_e5m2", "group_shape": GROUP_128, "eps": 448 * 2.0**-126},
        fp8core.ScaleError,
        "eps needs a number .* of at least 6.74e-34",
    ),
    "scale_ub that float32 does not hold": (lambda: {"scale_ub": 1e39}, fp8core.ScaleError, "scale_ub needs .*float32"),
    "scale_ub that float32 has as zero": (lambda: {"scale_ub": 1e-60}, fp8core.ScaleError, "scale_ub needs .*float32"),
    "eps that float32 does not hold": (
        lambda: {"eps": 1e39, "group_shape": GROUP_128},
        fp8core.ScaleError,
        "eps needs",
    ),
    "scale that float32 has as zero": (
        lambda: {"scale": 1e-60},
        fp8core.ScaleError,
        "scale needs a number that float32",
    ),
    "one place for all scales": (
        lambda: {"out": (None, windows((4, 1), (0, 1)))},
        fp8core.LayoutError,
        r"scale needs elements that do not overlap, got shape \(4, 1\)",
    ),
    "places that groups share": (
        lambda: {"out": (None, windows((4, 4), (3, 1))), "group_shape": (1, 16)},
        fp8core.LayoutError,
        "scale needs elements that do not overlap",
    ),
    "rows_padded of three axes": (
        lambda: {"x": fresh((2, 2, 8)), "rows_padded": 9},
        fp8core.ShapeError,
        "x needs two axes to be padded to 9 rows",
    ),
}


@pytest.mark.parametrize("epsilon", [-1e-6, float("nan"), float("inf"), 1e39], ids=repr)
def test_a_norm_refuses_what_it_cannot_add(epsilon):
    with pytest.raises(fp8core.ShapeError, match="epsilon needs a finite number"):
        fp8core.rms_norm_quant(fresh((2, 64)), fresh((64,)), epsilon)


ONES, WEIGHT = np.ones((4, 128), np.float32), fp8core.quantize(np.ones((4, 128), np.float32))
SUMS = {"out": np.ones((4, 4), np.float32), "out_dtype": "float32"}
NUMBERS = {
    "beta": lambda number: fp8core.scaled_mm(WEIGHT, WEIGHT.T, beta=number, **SUMS),
    "beta of nt": lambda number: fp8core.scaled_mm_nt(WEIGHT, WEIGHT, beta=number, **SUMS),
    "epsilon": lambda number: fp8core.rms_norm_quant(ONES, ONES[0], number),
    "eps of a norm": lambda number: fp8core.rms_norm_quant(ONES, ONES[0], 1e-6, group_shape=GROUP_128, eps=number),
    "eps of silu": lambda number: fp8core.silu_and_mul_quant(ONES, group_shape=(1, 64), eps=number),
    "eps": lambda number: fp8core.quantize(ONES, group_shape=GROUP_128, eps=number),
}


@pytest.mark.parametrize(
    "number", [True, np.True_, Fraction(1), Decimal(1), 1 + 0j, None, "1", [1], np.ones(1)], ids=repr
)
@pytest.mark.parametrize("option", NUMBERS)
def test_what_is_no_number_is_refused_though_it_equals_that_of_a_cached_call(option, number):
    for _ in range(2):
        with pytest.raises(
            fp8core.DTypeError, match=f"{option.split()[0]} needs a number, got {type(number).__name__}"
        ):
            NUMBERS[option](number)
        for same in (1.0, 1, np.float32(1)):
            NUMBERS[option](same)


EQUALS = {
    "use_fast_accum": lambda one: fp8core.linear(ONES, WEIGHT, use_fast_accum=one),
    "batch_invariant": lambda one: fp8core.scaled_mm_nt(WEIGHT, WEIGHT, batch_invariant=one),
    "round_intermediate": lambda one: fp8core.silu_and_mul_quant(ONES, round_intermediate=one),
    "rows_padded": lambda one: fp8core.quantize(ONES, rows_padded=one),
    "group_shape": lambda one: fp8core.dequantize(WEIGHT.data, WEIGHT.scale, group_shape=(one, -1)),
}


class One(Number):
    """A number with no `real`, as those of SymPy are."""

    def __float__(self):
        return 1.0

    def __eq__(self, other):
        return other == 1

    def __hash__(self):
        return 1


@pytest.mark.parametrize(
    "one", [1, True, np.True_, 1.0, np.int8(1), Fraction(1), Decimal(1), 1 + 0j, One()], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("option", EQUALS)
def test_what_equals_a_flag_or_a_whole_number_is_taken_in_a_first_call_too(option, one):
    forget()
    EQUALS[option](one)


@pytest.mark.parametrize(
    "other",
    [Fraction(1, 2), Fraction(10**400), Fraction(2**60 + 1, 2**60), Decimal("sNaN"), Decimal("Infinity"), 1 + 1j],
    ids=["half", "large", "near one", "signaling", "infinite", "complex"],
)
@pytest.mark.parametrize("option", EQUALS)
def test_a_number_that_equals_no_whole_number_is_refused_by_name(option, other):
    with pytest.raises((fp8core.DTypeError, fp8core.ShapeError), match=f"{option} needs"):
        EQUALS[option](other)


@pytest.mark.parametrize("case", QUANTIZE)
def test_quantize_refuses_and_writes_nothing(case):
    change, error, words = QUANTIZE[case]
    arguments = {"x": fresh((4, 64)), **change()}
    before = {name: np.array(value, copy=True) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    x = arguments.pop("x")
    with pytest.raises(error, match=words):
        fp8core.quantize(x, **arguments)
    for name, value in before.items():
        now = x if name == "x" else arguments[name]
        assert np.array(now, copy=True).tobytes() == value.tobytes(), f"{name} was changed"


PRODUCT = {
    "k differs": (
        lambda: {"b": fresh_fp8((32, 65)).T},
        fp8core.ShapeError,
        r"share k, got a .*\(4, 64\) and b .*\(65, 32\)$",
    ),
    "bias in FP8": (
        lambda: {"bias": fresh_fp8((32,)), "out_dtype": "float8_e4m3fn", "out_scale": 1.0},
        fp8core.DTypeError,
        "bias needs float32, got float8_e4m3fn",
    ),
    "amax in the bias": (lambda: amax_in_bias(5), fp8core.LayoutError, "amax needs memory of its own.*overlaps bias"),
    "a is bfloat16": (lambda: {"a": fresh((4, 64))}, fp8core.DTypeError, "a needs an FP8"),
    "b is bfloat16": (lambda: {"b": fresh((32, 64)).T}, fp8core.DTypeError, "b needs an FP8"),
    "b has rows": (lambda: {"b": fresh_fp8((64, 32))}, fp8core.LayoutError, "b needs contiguous columns"),
    "b has three axes": (lambda: {"b": fresh_fp8((1, 64, 32))}, fp8core.ShapeError, "b needs two axes"),
    "a has strided columns": (lambda: {"a": fresh_fp8((4, 128))[:, ::2]}, fp8core.LayoutError, "a needs"),
    "both e5m2": (
        lambda: {"a": fresh_fp8((4, 64), "float8_e5m2"), "b": fresh_fp8((32, 64), "float8_e5m2").T},
        fp8core.UnsupportedProblemError,
        "e5m2",
    ),
    "scale_a of the wrong length": (lambda: {"scale_a": fresh_scale((5, 1))}, fp8core.ShapeError, r"scale_a.*\(4, 1\)"),
    "scale_b of the wrong length": (
        lambda: {"scale_b": fresh_scale((1, 31))},
        fp8core.ShapeError,
        r"scale_b.*\(1, 32\)",
    ),
    "scale_a in fp16": (lambda: {"scale_a": np.ones(1, np.float16)}, fp8core.DTypeError, "scale_a needs float32"),
    "bias of the wrong length": (lambda: {"bias": fresh((31,))}, fp8core.ShapeError, "bias needs 32"),
    "bias of the wrong dtype": (lambda: {"bias": fresh((32,), "float16")}, fp8core.DTypeError, "bias needs"),
    "out_dtype of integers": (lambda: {"out_dtype": "int32"}, fp8core.DTypeError, "int32"),
    "FP8 without out_scale": (lambda: {"out_dtype": "float8_e4m3fn"}, fp8core.ScaleError, "out_scale"),
    "out_scale without FP8": (lambda: {"out_scale": ONE}, fp8core.ScaleError, "out_scale"),
    "out of the wrong shape": (lambda: {"out": fresh((4, 33))}, fp8core.ShapeError, r"out needs shape \(4, 32\)"),
    "out of the wrong dtype": (lambda: {"out": fresh((4, 32), "float16")}, fp8core.DTypeError, "out needs bfloat16"),
    "beta that float32 has as zero": (
        lambda: {"beta": 1e-60, "out": fresh((4, 32))},
        fp8core.ScaleError,
        "beta needs a finite number that float32 holds",
    ),
    "amax of two": (lambda: {"amax": np.ones(2, np.float32)}, fp8core.ShapeError, "amax"),
}


@pytest.mark.parametrize("case", PRODUCT)
def test_scaled_mm_refuses(case):
    change, error, words = PRODUCT[case]
    changed = change()
    arguments = product(**changed)
    out = arguments.get("out")
    before = None if out is None else out.tobytes()
    with pytest.raises(error, match=words):
        fp8core.scaled_mm(**arguments)
    assert out is None or out.tobytes() == before


def test_block_scales_in_the_other_orientation_are_refused_with_the_shape_that_was_needed():
    a, weight = fresh_fp8((4, 512)), fresh_fp8((256, 512))
    groups, blocks = fresh_scale((4, 4)), fresh_scale((2, 4))
    with pytest.raises(fp8core.ShapeError, match=r"\(4, 2\).*orientation \[k, n\], got \(2, 4\)"):
        fp8core.scaled_mm(a, weight.T, groups, blocks)
    with pytest.raises(fp8core.ShapeError, match=r"\(2, 4\).*stored weight.*got \(4, 2\)"):
        fp8core.scaled_mm_nt(a, weight, groups, np.ascontiguousarray(blocks.T))
    assert fp8core.scaled_mm_nt(a, weight, groups, blocks).shape == (4, 256)


def test_blocks_of_the_weight_need_groups_of_the_tokens():
    q = fp8core.quantize(fresh((256, 256)), group_shape=BLOCK_128)
    with pytest.raises(fp8core.ScaleError, match=r"group_shape=\(1, 128\)"):
        fp8core.linear(fresh((3, 256)), q.data, q.scale, group_shape=PER_TOKEN)


def test_linear_of_fp8_needs_the_scale_of_its_input():
    q = fp8core.quantize(fresh((32, 64)))
    with pytest.raises(fp8core.ScaleError, match="input_scale"):
        fp8core.linear(q.data, q.data, q.scale)


def test_strides_of_a_weight_without_rows_have_no_meaning():
    weight = fresh_fp8((0, 128))[:, ::2]
    assert fp8core.scaled_mm_nt(fresh_fp8((4, 64)), weight, 1.0, 1.0).shape == (4, 0)


def test_a_layer_refuses_a_scale_that_is_not_of_the_stated_groups_of_its_input():
    x = fp8core.Quantized(fresh_fp8((4, 200)), fresh_scale((4, 1)), PER_TENSOR)
    layer = fp8core.Fp8Linear(fresh_fp8((8, 200)), 0.5)
    for _ in range(2):
        with pytest.raises(fp8core.ShapeError, match="input_scale for m=4, k=200 needs shape"):
            layer(x)


@pytest.mark.parametrize(
    ("group_shape", "shape"),
    [
        (PER_TENSOR, (4, 1)),
        (PER_TENSOR, (4,)),
        (PER_TOKEN, (4, 2)),
        (PER_TOKEN, (1, 2)),
        (GROUP_128, (4, 1)),
        (GROUP_128, (2,)),
        (GROUP_128, (4, 3)),
    ],
    ids=str,
)
def test_a_layer_refuses_a_scale_that_no_input_of_its_groups_has(group_shape, shape):
    with pytest.raises(fp8core.ShapeError, match=r"^input_scale needs one number, of shape .*, got shape"):
        fp8core.Fp8Linear(fresh_fp8((8, 200)), 0.5, input_scale=fresh_scale(shape), group_shape=group_shape)


WEIGHTS = {
    "widths do not add up": (
        lambda w, s: fp8core.requantize_with_max_scale(w, s, [3, 4]),
        fp8core.ShapeError,
        "add up to the 8 rows",
    ),
    "too few scales": (lambda w, s: fp8core.requantize_with_max_scale(w, s, [2, 2, 4]), fp8core.ScaleError, "3 shards"),
    "no scale": (
        lambda w, s: fp8core.requantize_with_max_scale(w[:0], s[:0], []),
        fp8core.ScaleError,
        "weight_scale needs at least one scale",
    ),
    "negative width": (lambda w, s: fp8core.requantize_with_max_scale(w, s, [9, -1]), fp8core.ShapeError, "at least 0"),
    "too many rows": (
        lambda w, s: fp8core.convert_to_channelwise(s, [1, 2**31 - 1]),
        fp8core.ShapeError,
        "logical_widths needs .* at most 2147483647 together",
    ),
    "not FP8": (lambda w, s: fp8core.requantize_with_max_scale(fresh((8, 4)), s, [4, 4]), fp8core.DTypeError, "weight"),
    "fnuz already": (
        lambda w, s: fp8core.normalize_e4m3fn_to_e4m3fnuz(w.view(ml_dtypes.float8_e4m3fnuz), s),
        fp8core.DTypeError,
        "weight needs float8_e4m3fn,",
    ),
    "not contiguous": (
        lambda w, s: fp8core.normalize_e4m3fn_to_e4m3fnuz(w[:, :2], s),
        fp8core.LayoutError,
        "weight needs contiguous",
    ),
    "result not contiguous": (
        lambda w, s: fp8core.normalize_e4m3fn_to_e4m3fnuz(w, s, out=fresh_fp8((8, 8))[:, :4]),
        fp8core.LayoutError,
        "out needs contiguous",
    ),
    "result of another shape": (
        lambda w, s: fp8core.normalize_e4m3fn_to_e4m3fnuz(w, s, out=fresh_fp8((4, 8))),
        fp8core.ShapeError,
        r"out needs shape \(8, 4\)",
    ),
    "result of another format": (
        lambda w, s: fp8core.normalize_e4m3fn_to_e4m3fnuz(w, s, out=fresh_fp8((8, 4), "float8_e5m2")),
        fp8core.DTypeError,
        "out needs float8_e4m3fnuz, or float8_e4m3fn",
    ),
    "result a row further": (
        lambda w, s: fp8core.normalize_e4m3fn_to_e4m3fnuz(w[:4], s, out=w[1:5]),
        fp8core.LayoutError,
        "out needs memory of its own",
    ),
    "requantized a row further": (
        lambda w, s: fp8core.requantize_with_max_scale(w[:4], s, [2, 2], out=w[1:5]),
        fp8core.LayoutError,
        "out needs memory of its own",
    ),
    "requantized with other strides": (
        lambda w, s: fp8core.requantize_with_max_scale(w[:4], s, [2, 2], out=w[::2]),
        fp8core.LayoutError,
        "out needs memory of its own",
    ),
    "weight_scale in fp16": (
        lambda w, s: fp8core.normalize_e4m3fn_to_e4m3fnuz(w, s.astype(np.float16)),
        fp8core.DTypeError,
        "weight_scale needs float32",
    ),
    "input_scale in exponents": (
        lambda w, s: fp8core.normalize_e4m3fn_to_e4m3fnuz(w, s, np.ones(1, ml_dtypes.float8_e8m0fnu)),
        fp8core.DTypeError,
        "input_scale needs float32",
    ),
    "two axes": (lambda w, s: fp8core.all_close_1d(s[None]), fp8core.ShapeError, "one axis"),
    "strided scale": (
        lambda w, s: fp8core.convert_to_channelwise(np.ones(4, np.float32)[::2], [1, 1]),
        fp8core.LayoutError,
        "contiguous",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weight_functions_refuse(case):
    call, error, words = WEIGHTS[case]
    weight, scale = fresh_fp8((8, 4)), fresh_scale((2,))
    before = weight.tobytes()
    with pytest.raises(error, match=words):
        call(weight, scale)
    assert weight.tobytes() == before


def of_codes(x, weight, **options):
    """Return the product of codes that are given apart from their scale."""
    return fp8core.linear(x.data, weight, input_scale=x.scale, **options)


@pytest.mark.parametrize(("given", "wrong"), [((1, 128), (-1, -1)), ((1, -1), (-1, -1)), ((1, -1), (1, 128))], ids=str)
def test_linear_refuses_another_group_shape_than_that_of_codes(given, wrong):
    x = fp8core.quantize(fresh((4, 256)), group_shape=given)
    weight = fp8core.quantize(fresh((8, 256)), group_shape=BLOCK_128 if given == GROUP_128 else PER_TOKEN)
    want = fp8core.scaled_mm_nt(x, weight)
    for group_shape in (given, PER_TOKEN):  # the default
        np.testing.assert_array_equal(fp8core.linear(x, weight, group_shape=group_shape), want)
        np.testing.assert_array_equal(of_codes(x, weight, group_shape=group_shape), want)
    with pytest.raises(fp8core.ScaleError, match=r"group_shape needs to be that of x, \(1, .*\), or left out, got "):
        fp8core.linear(x, weight, group_shape=wrong)
    with pytest.raises(fp8core.ShapeError, match=r"input_scale for m=4, k=256 needs shape .*, got"):
        of_codes(x, weight, group_shape=wrong)


def test_every_error_is_the_library_s_and_python_s():
    for error in (fp8core.ShapeError, fp8core.LayoutError, fp8core.DeviceError, fp8core.ScaleError):
        assert issubclass(error, fp8core.Fp8Error)
        assert issubclass(error, ValueError)
    assert issubclass(fp8core.UnsupportedProblemError, ValueError)
    assert issubclass(fp8core.DTypeError, TypeError)


def test_a_read_only_array_receives_nothing():
    out = fresh_fp8((4, 64))
    out.flags.writeable = False
    with pytest.raises(fp8core.LayoutError, match="read-only"):
        fp8core.quantize(fresh((4, 64)), out=out)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, **options: fp8core.quantize(x, **options),
        lambda x, **options: fp8core.rms_norm_quant(x, fresh((64,)), 1e-6, **options),
        lambda x, **options: fp8core.silu_and_mul_quant(np.concatenate([x, x], 1), **options),
    ],
    ids=["quantize", "rms_norm_quant", "silu_and_mul_quant"],
)
def test_a_given_scale_is_no_result(call):
    x, out = fresh((4, 64)), fresh_fp8((4, 64))
    for given in (out, (out, ONE), (out, None)):
        assert call(x, scale=ONE, group_shape=PER_TENSOR, out=given).scale is ONE
    with pytest.raises(fp8core.ScaleError, match="out needs no scale"):
        call(x, scale=ONE, group_shape=PER_TENSOR, out=(out, ONE.copy()))


def test_what_is_no_array_is_refused():
    with pytest.raises(fp8core.DTypeError, match="x"):
        fp8core.quantize([[1.0, 2.0]])


@pytest.mark.gpu
def test_operands_on_different_devices():
    import cupy

    with pytest.raises(fp8core.DeviceError, match="scale"):
        fp8core.quantize(cupy.ones((4, 64), cupy.float32), scale=ONE)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("rows", "channels"), [(0, 8), (4, 0)])
@pytest.mark.parametrize(("more", "dtype"), [((1, 0), "float32"), ((0, 1), "float32"), ((0, 0), "float16")])
def test_an_array_that_cannot_hold_results_is_refused_where_there_are_none(rows, channels, quantized, more, dtype):
    x, weight = fresh((rows, 64), "float32"), fp8core.quantize(fresh((channels, 64)))
    out = np.empty((rows + more[0], channels + more[1]), dtype)
    with pytest.raises(fp8core.Fp8Error, match=rf"^out needs (float32|shape \({rows}, {channels}\)), got"):
        fp8core.linear(fp8core.quantize(x) if quantized else x, weight, out=out, out_dtype="float32")


@engines(*BOTH)
def test_explain_refuses_like_the_call(engine):
    with pytest.raises(fp8core.ShapeError, match="share k"):
        fp8core.explain(
            fp8core.scaled_mm,
            **{
                n: engine.array(v) if n != "b" else engine.array(v.T).T
                for n, v in product(b=fresh_fp8((32, 65)).T).items()
            },
        )


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_a_traceback_shows_the_refusal_alone(framework):
    of = {"numpy": "asarray", "torch": "from_numpy", "jax": "asarray"}[framework]
    module = pytest.importorskip("jax.numpy" if framework == "jax" else framework)
    x, weight = fresh((4, 64), "float32"), fp8core.quantize(fresh((8, 64), "float32"))
    fp8core.linear(getattr(module, of)(x), weight)  # a kind of call that is known
    for options in ({"out_dtype": "float7"}, {"group_shape": (1, 64)}):
        with pytest.raises(fp8core.Fp8Error) as refused:
            fp8core.linear(getattr(module, of)(x), weight, **options)
        assert refused.value.__context__ is None
