"""What quantize and the fused producers refuse: nothing is launched or written."""

import numpy as np
import pytest

import fp8core
from fp8core import GROUP_128, PER_TENSOR, PER_TOKEN
from support.engines import fresh, fresh_fp8

ONE = np.ones(1, np.float32)


def windows(shape, strides):
    """Return a float32 array some of whose elements may be one."""
    return np.lib.stride_tricks.as_strided(np.ones(64, np.float32), shape, [4 * stride for stride in strides])


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
    "scale_ub of two": (lambda: {"scale_ub": np.ones(2, np.float32)}, fp8core.ShapeError, "scale_ub needs one number"),
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


def test_the_eps_that_is_the_default_is_refused_nowhere():
    """As a number of float32 it is not the number of float64 that the default is."""
    for options in ({}, {"group_shape": PER_TENSOR}, {"scale": ONE}):
        for number in (1e-10, np.float32(1e-10)):
            fp8core.quantize(fresh((2, 64)), eps=number, **options)


@pytest.mark.parametrize("epsilon", [-1e-6, float("nan"), float("inf"), 1e39], ids=repr)
def test_a_norm_refuses_what_it_cannot_add(epsilon):
    with pytest.raises(fp8core.ShapeError, match="epsilon needs a finite number"):
        fp8core.rms_norm_quant(fresh((2, 64)), fresh((64,)), epsilon)


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
