"""What `moe_permute` refuses: scales that rows do not have for themselves, and sizes that kernels cannot count."""

import numpy as np
import pytest

import fp8core
from fp8core import PER_TENSOR, ArraySpec, Quantized
from fp8core.errors import DTypeError, ScaleError, ShapeError, UnsupportedProblemError
from support.engines import fresh_fp8

IDS = np.zeros((4, 2), np.int32)


@pytest.mark.parametrize(
    ("tokens", "scale", "group", "error", "message"),
    [
        (
            4,
            np.ones((1, 1), np.float32),
            (4, -1),
            ScaleError,
            r"x needs scales per tensor, per token or by groups of 1xg, got group_shape \(4, -1\)",
        ),
        (4, np.ones((1, 1), np.float32), (128, 128), ScaleError, r"got group_shape \(128, 128\)"),
        (1, np.ones((1, 2), np.float32), (128, 128), ScaleError, r"got group_shape \(128, 128\)"),
        (1, np.ones((1, 2), np.float32), (-1, 128), ScaleError, r"got group_shape \(-1, 128\)"),
        (1, 0.5, (2, -1), ScaleError, r"got group_shape \(2, -1\)"),
        (4, np.ones((4, 1), np.float32), PER_TENSOR, ShapeError, r"scale needs one number, .* got \(4, 1\)"),
        (4, None, PER_TENSOR, DTypeError, "scale needs an array, got None"),
        (4, None, None, DTypeError, "scale needs an array, got None"),
        (4, [[1.0]] * 4, None, DTypeError, "scale needs an array that offers DLPack, got builtins.list"),
    ],
    ids=str,
)
def test_scales_that_are_not_of_rows(tokens, scale, group, error, message):
    with pytest.raises(error, match=message):
        fp8core.moe_permute(Quantized(fresh_fp8((tokens, 256)), scale, group), IDS[:tokens], 3)


@pytest.mark.parametrize("operation", [fp8core.moe_permute, fp8core.moe_unpermute])
def test_too_many_tokens_without_choices(operation):
    permutes = operation is fp8core.moe_permute
    x, none = ArraySpec((1 << 30 if permutes else 8, 8), "float32"), ArraySpec((1 << 30, 0), "int32")
    with pytest.raises(UnsupportedProblemError, match=r"(topk_ids|inverse) needs less than 2\*\*30 rows and elements"):
        fp8core.explain(operation, x, none, *((4,) if permutes else ()), target="sm_90")


def test_too_many_scales_of_a_row():
    x = Quantized(ArraySpec((1024, 1 << 21), "float8_e4m3fn"), ArraySpec((1024, 1 << 21), "float32"), (1, 1))
    with pytest.raises(UnsupportedProblemError, match=r"scale needs less than 2\*\*21 groups of a row, got 2097152"):
        fp8core.explain(fp8core.moe_permute, x, ArraySpec((1024, 1), "int32"), 4, target="sm_90")
