"""What `grouped_scaled_mm_nt` refuses: the error, its whole message, and that nothing was written."""

import ml_dtypes
import numpy as np
import pytest

import fp8core
from core.grouped_calls import GROUPS, ROWS, K, N, check_refused, ends, good
from fp8core import DeviceError, DTypeError, LayoutError, ShapeError, UnsupportedProblemError
from fp8core.core.grouped import grouped_product_of
from fp8core.core.specs import TensorSpec
from fp8core.interop.dlpack import contiguous
from fp8core.target import HOST
from support.engines import fresh, fresh_fp8, fresh_scale
from support.targets import H200

FP8 = "float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz"
FLOATS = "float32, float16, bfloat16"
E5M2 = "float8_e5m2"


def overlapping():
    """Return an ``out`` whose rows share memory."""
    return np.lib.stride_tricks.as_strided(fresh((ROWS, N)), (ROWS, N), (2 * (N - 1), 2))


REFUSED = {
    # ranks and extents
    "a of three axes": (
        lambda: {"a": fresh_fp8((2, 3, K))},
        ShapeError,
        "a needs two axes [rows, k], got shape (2, 3, 64)",
    ),
    "a of one axis": (lambda: {"a": fresh_fp8((K,))}, ShapeError, "a needs two axes [rows, k], got shape (64,)"),
    "a weight of two axes": (
        lambda: {"weight": fresh_fp8((N, K))},
        ShapeError,
        "weight needs three axes [groups, n, k], got shape (32, 64)",
    ),
    "a weight of four axes": (
        lambda: {"weight": fresh_fp8((1, GROUPS, N, K))},
        ShapeError,
        "weight needs three axes [groups, n, k], got shape (1, 3, 32, 64)",
    ),
    "another k": (
        lambda: {"weight": fresh_fp8((GROUPS, N, 65))},
        ShapeError,
        "a and weight[i] must share k, got a [..., k] of shape (6, 64) and weight[i] [n, k] of shape (32, 65)",
    ),
    "turned weights": (
        lambda: {"weight": fresh_fp8((GROUPS, K, N)), "bias": None},
        ShapeError,
        (
            "a and weight[i] must share k, got a [..., k] of shape (6, 64) and weight[i] [n, k] of shape (64, 32): "
            "the transpose of weight[i] has k=64"
        ),
    ),
    # ends
    "no ends": (lambda: {"offs": None}, DTypeError, "offs needs an array, got None"),
    "ends as a list": (
        lambda: {"offs": [1, 4, 6]},
        DTypeError,
        "offs needs an array that offers DLPack, got builtins.list",
    ),
    "an end as a number": (lambda: {"offs": 6}, DTypeError, "offs needs an array that offers DLPack, got builtins.int"),
    **{
        f"ends of {dtype}": (
            lambda dtype=dtype: {"offs": ends(GROUPS, dtype=dtype)},
            DTypeError,
            f"offs needs an array of int32, got {dtype}",
        )
        for dtype in ("uint32", "int16", "float64")
    },
    **{
        f"ends of {dtype}": (
            lambda dtype=dtype: {"offs": ends(GROUPS, dtype=dtype)},
            DTypeError,
            f"offs needs int32, got {dtype}",
        )
        for dtype in ("int64", "float32", "uint8")
    },
    "ends that begin with 0": (
        lambda: {"offs": ends(GROUPS + 1)},
        ShapeError,
        "offs needs shape (3,), where each group of rows ends, got (4,): offs[1:] leaves out the leading 0",
    ),
    "too few ends": (
        lambda: {"offs": ends(GROUPS - 1)},
        ShapeError,
        "offs needs shape (3,), where each group of rows ends, got (2,)",
    ),
    "ends of two axes": (
        lambda: {"offs": ends(GROUPS, 1)},
        ShapeError,
        "offs needs shape (3,), where each group of rows ends, got (3, 1)",
    ),
    "ends of no axes": (
        lambda: {"offs": ends()},
        ShapeError,
        "offs needs shape (3,), where each group of rows ends, got ()",
    ),
    "ends apart": (
        lambda: {"offs": ends(2 * GROUPS)[::2]},
        LayoutError,
        "offs needs contiguous memory, got shape (3,) with strides (2,)",
    ),
    "reversed ends": (
        lambda: {"offs": ends(GROUPS)[::-1]},
        LayoutError,
        "offs needs contiguous memory, got shape (3,) with strides (-1,)",
    ),
    "one end for all": (
        lambda: {"offs": np.broadcast_to(ends(1), GROUPS)},
        LayoutError,
        "offs needs contiguous memory, got shape (3,) with strides (0,)",
    ),
    # dtypes
    "a of bfloat16": (lambda: {"a": fresh((ROWS, K))}, DTypeError, f"a needs an FP8 dtype ({FP8}), got bfloat16"),
    "a of int32": (lambda: {"a": ends(ROWS, K)}, DTypeError, f"a needs an FP8 dtype ({FP8}), got int32"),
    "a weight of bytes": (
        lambda: {"weight": fresh_fp8((GROUPS, N, K)).view(np.uint8)},
        DTypeError,
        f"weight[i] needs an FP8 dtype ({FP8}), got uint8: fp8core.Float8Array gives bytes an FP8 dtype",
    ),
    "a weight of int32": (
        lambda: {"weight": ends(GROUPS, N, K)},
        DTypeError,
        f"weight[i] needs an FP8 dtype ({FP8}), got int32",
    ),
    "scale_a of int32": (lambda: {"scale_a": ends(ROWS, 1)}, DTypeError, "scale_a needs float32, got int32"),
    "scale_b of float16": (
        lambda: {"scale_b": fresh((GROUPS, N, 1), "float16")},
        DTypeError,
        "scale_b[i] needs float32, got float16",
    ),
    "a bias of int32": (
        lambda: {"bias": ends(GROUPS, N)},
        DTypeError,
        "bias[i] needs the dtype of the result, bfloat16, or float32, got int32",
    ),
    "a bias of another dtype": (
        lambda: {"bias": fresh((GROUPS, N), "float16")},
        DTypeError,
        "bias[i] needs the dtype of the result, bfloat16, or float32, got float16",
    ),
    **{
        f"out_dtype {dtype}": (
            lambda dtype=dtype: {"out_dtype": dtype},
            DTypeError,
            f"out_dtype needs one of {FLOATS}, or a framework's dtype of that name, got {dtype!r}",
        )
        for dtype in ("float8_e4m3fn", "float8_e5m2fnuz", "int32", "uint8", "float64", None)
    },
    "a flag that is none": (
        lambda: {"use_fast_accum": "yes"},
        DTypeError,
        "use_fast_accum needs True or False, got 'yes'",
    ),
    "out of another dtype": (
        lambda: {"out": fresh((ROWS, N), "float32")},
        DTypeError,
        "out needs bfloat16, got float32",
    ),
    "out of int32": (lambda: {"out": ends(ROWS, N)}, DTypeError, "out needs bfloat16, got int32"),
    # layouts
    "strided columns of a": (
        lambda: {"a": fresh_fp8((ROWS, 2 * K))[:, ::2]},
        LayoutError,
        "a needs a contiguous last axis, got shape (6, 64) with strides (128, 2) (elements)",
    ),
    "strided columns of the weight": (
        lambda: {"weight": fresh_fp8((GROUPS, N, 2 * K))[..., ::2]},
        LayoutError,
        "weight[i] needs contiguous rows [n, k], got strides (128, 2) (elements) over (n, k)",
    ),
    "weights [groups, k, n], turned": (
        lambda: {"weight": fresh_fp8((GROUPS, K, N)).transpose(0, 2, 1)},
        LayoutError,
        "weight[i] needs contiguous rows [n, k], got strides (1, 32) (elements) over (n, k)",
    ),
    "weights in reversed order": (
        lambda: {"weight": fresh_fp8((GROUPS, N, K))[::-1]},
        LayoutError,
        "weight needs groups in ascending order, got strides (-2048, 64, 1) (elements)",
    ),
    "one channel for all": (
        lambda: {"weight": np.broadcast_to(fresh_fp8((GROUPS, 1, K)), (GROUPS, N, K))},
        LayoutError,
        "weight[i] needs contiguous rows [n, k], got strides (0, 1) (elements) over (n, k)",
    ),
    # bias and out
    "one bias for all groups": (
        lambda: {"bias": fresh((N,))},
        ShapeError,
        "bias needs shape (3, 32), one row per group, got (32,)",
    ),
    "a bias of fewer groups": (
        lambda: {"bias": fresh((2, N))},
        ShapeError,
        "bias needs shape (3, 32), one row per group, got (2, 32)",
    ),
    "a bias of fewer channels": (
        lambda: {"bias": fresh((GROUPS, N - 1))},
        ShapeError,
        "bias needs shape (3, 32), one row per group, got (3, 31)",
    ),
    "a strided bias": (
        lambda: {"bias": fresh((GROUPS, 2 * N))[:, ::2]},
        LayoutError,
        "bias[i] needs 32 contiguous elements, got shape (32,) with strides (2,)",
    ),
    "out of fewer rows": (lambda: {"out": fresh((5, N))}, ShapeError, "out needs shape (6, 32), got (5, 32)"),
    "out by group": (lambda: {"out": fresh((GROUPS, 2, N))}, ShapeError, "out needs shape (6, 32), got (3, 2, 32)"),
    "strided columns of out": (
        lambda: {"out": fresh((ROWS, 2 * N))[:, ::2]},
        LayoutError,
        "out needs a contiguous last axis, got shape (6, 32) with strides (64, 2) (elements)",
    ),
    "reversed rows of out": (
        lambda: {"out": fresh((ROWS, N))[::-1]},
        LayoutError,
        "out needs rows in ascending order, got strides (-32, 1) (elements)",
    ),
    "rows of out that overlap": (
        lambda: {"out": overlapping()},
        LayoutError,
        "out needs rows that do not overlap, got strides (31, 1) (elements)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_call_is_refused(case):
    check_refused(*REFUSED[case])


def test_the_good_call_is_good():
    arguments = good()
    assert fp8core.grouped_scaled_mm_nt(**arguments) is arguments["out"]


def test_both_e5m2_are_refused_unless_there_is_nothing_to_multiply():
    arguments = good(a=fresh_fp8((ROWS, K), E5M2), weight=fresh_fp8((GROUPS, N, K), E5M2))
    before = arguments["out"].tobytes()
    with pytest.raises(UnsupportedProblemError, match="e5m2"):
        fp8core.grouped_scaled_mm_nt(**arguments)
    assert arguments["out"].tobytes() == before
    nothing = {"a": fresh_fp8((0, K), E5M2), "scale_a": fresh_scale((0, 1)), "out": None}
    assert fp8core.grouped_scaled_mm_nt(**arguments | nothing).shape == (0, N)


@pytest.mark.parametrize("under", ["a", "weight", "scale_a", "scale_b", "bias", "offs"])
def test_a_result_in_the_memory_of_an_operand_is_refused(under):
    arguments = good()
    there = np.zeros(max(arguments[under].nbytes, ROWS * N * 2), np.uint8)
    there[: arguments[under].nbytes] = arguments[under].reshape(-1).view(np.uint8)
    operand = there[: arguments[under].nbytes].view(arguments[under].dtype).reshape(arguments[under].shape)
    out, before = there[: ROWS * N * 2].view(ml_dtypes.bfloat16).reshape(ROWS, N), there.tobytes()
    with pytest.raises(LayoutError) as refused:
        fp8core.grouped_scaled_mm_nt(**arguments | {under: operand, "out": out})
    assert str(refused.value) == f"out needs memory of its own, got an array that overlaps {under}"
    assert there.tobytes() == before


def test_a_read_only_result_is_refused():
    arguments = good()
    arguments["out"].flags.writeable = False
    with pytest.raises(LayoutError, match="out needs to be writable"):
        fp8core.grouped_scaled_mm_nt(**arguments)


SPECS = {
    "a": ((ROWS, K), "float8_e4m3fn"),
    "weight": ((GROUPS, N, K), "float8_e4m3fn"),
    "scale_a": ((ROWS, 1), "float32"),
    "scale_b": ((GROUPS, N, 1), "float32"),
    "bias": ((GROUPS, N), "bfloat16"),
    "offs": ((GROUPS,), "int32"),
    "out": ((ROWS, N), "bfloat16"),
}
"""The operands of the good call without memory."""


@pytest.mark.parametrize("away", [name for name in SPECS if name != "a"])
def test_an_operand_on_another_device_is_refused(away):
    made = {
        name: TensorSpec(name, dtype, shape, contiguous(shape), HOST if name == away else H200)
        for name, (shape, dtype) in SPECS.items()
    }
    out = made.pop("out")
    with pytest.raises(DeviceError, match=rf"^{away}(\[i\])? needs to be where a is, on sm_90 .*, got host$"):
        grouped_product_of(**made, out_dtype="bfloat16").problem(True, out)
