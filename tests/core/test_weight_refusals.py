"""What the functions of stored weights refuse: the weight stays as it was."""

import ml_dtypes
import numpy as np
import pytest

import fp8core
from support.engines import fresh, fresh_fp8, fresh_scale

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
