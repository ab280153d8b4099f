"""What `grouped_scaled_mm_nt` refuses: the error, its whole message, and that nothing was written."""

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core import DeviceError, DTypeError, LayoutError, ScaleError, ShapeError, UnsupportedProblemError
from fp8core.core.grouped import grouped_product_of
from fp8core.core.specs import TensorSpec
from fp8core.interop.dlpack import contiguous
from fp8core.problem import HOST
from support.engines import fresh, fresh_fp8, fresh_scale
from support.targets import H200

GROUPS, ROWS, N, K = 3, 6, 32, 64
FP8 = "float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz"
FLOATS = "float32, float16, bfloat16"
E5M2 = "float8_e5m2"


def good(**changes):
    """Return the arguments of a good call, with changes."""
    return {
        "a": fresh_fp8((ROWS, K)),
        "weight": fresh_fp8((GROUPS, N, K)),
        "scale_a": fresh_scale((ROWS, 1)),
        "scale_b": fresh_scale((GROUPS, N, 1)),
        "offs": np.array([1, 4, 6], np.int32),
        "bias": fresh((GROUPS, N)),
        "out": fresh((ROWS, N)),
        **changes,
    }


def ends(*shape, dtype=np.int32):
    return np.zeros(shape, dtype)


def overlapping():
    """Return an ``out`` whose rows share memory."""
    return np.lib.stride_tricks.as_strided(fresh((ROWS, N)), (ROWS, N), (2 * (N - 1), 2))


def per_channel(data, shape):
    return fp8core.Quantized(data, fresh_scale(shape), fp8core.PER_CHANNEL)


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
    # scales
    "no scale_b": (
        lambda: {"scale_b": None},
        ScaleError,
        "weight needs scale_b or to be a Quantized, as quantize returns it, got neither",
    ),
    "two scales of the weight": (
        lambda: {"weight": per_channel(fresh_fp8((GROUPS, N, K)), (GROUPS, N, 1))},
        ScaleError,
        "scale_b needs to be left out where weight is a Quantized, got both",
    ),
    "scales of fewer groups": (
        lambda: {"scale_b": fresh_scale((2, N, 1))},
        ShapeError,
        "scale_b needs one number, or 3 groups along its first axis, as weight(3, 32, 64) has, got shape (2, 32, 1)",
    ),
    "channels for all groups": (
        lambda: {"scale_b": fresh_scale((N, 1))},
        ShapeError,
        "scale_b needs one number, or 3 groups along its first axis, as weight(3, 32, 64) has, got shape (32, 1)",
    ),
    "a Quantized with scales of fewer groups": (
        lambda: {"weight": per_channel(fresh_fp8((GROUPS, N, K)), (1, N, 1)), "scale_b": None},
        ShapeError,
        "scale_b needs one number, or 3 groups along its first axis, as weight(3, 32, 64) has, got shape (1, 32, 1)",
    ),
    "scales of fewer channels": (
        lambda: {"scale_b": fresh_scale((GROUPS, N - 1, 1))},
        ShapeError,
        (
            "scale_b[i] for n=32, k=64 needs shape (), (1,) or (1, 1) per tensor, (32, 1) or (32,) per channel, (1, 1) for "
            "blocks of 128x128 or (32, 1) for groups of 1x128, in the orientation of the stored weight [n, k], got (31, 1)"
        ),
    ),
    "scales of four axes": (
        lambda: {"scale_b": fresh_scale((GROUPS, N, 1, 1))},
        ShapeError,
        (
            "scale_b[i] for n=32, k=64 needs shape (), (1,) or (1, 1) per tensor, (32, 1) or (32,) per channel, (1, 1) for "
            "blocks of 128x128 or (32, 1) for groups of 1x128, in the orientation of the stored weight [n, k], "
            "got (32, 1, 1)"
        ),
    ),
    "scales of a by group": (
        lambda: {"scale_a": fresh_scale((GROUPS,))},
        ShapeError,
        (
            "scale_a for m=6, k=64 needs shape (), (1,) or (1, 1) per tensor, (6, 1) or (6,) per token, "
            "(6, 1) for groups of 1x128, got (3,)"
        ),
    ),
    "groups of a beside one number": (
        lambda: {
            "a": fresh_fp8((ROWS, 256)),
            "weight": fresh_fp8((GROUPS, N, 256)),
            "scale_a": fresh_scale((ROWS, 2)),
            "scale_b": 0.5,
        },
        ScaleError,
        "scale_a for groups of 1x128 needs scale_b for 128x128 blocks or 1x128 groups, got one per tensor",
    ),
    "blocks beside tokens": (
        lambda: {
            "a": fresh_fp8((ROWS, 256)),
            "weight": fresh_fp8((GROUPS, N, 256)),
            "scale_b": fresh_scale((GROUPS, 1, 2)),
        },
        ScaleError,
        (
            "scale_b[i] with one scale per 128x128 block needs scale_a for groups of 1x128, with group_shape=(1, 128), "
            "got one per token"
        ),
    ),
    "a number that float32 does not hold": (
        lambda: {"scale_b": 1e39},
        ScaleError,
        "scale_b needs a number that float32 holds, got 1e+39",
    ),
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
    change, error, message = REFUSED[case]
    arguments = good(**change())
    before = {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    with pytest.raises(error) as refused:
        fp8core.grouped_scaled_mm_nt(**arguments)
    assert str(refused.value) == message
    assert {name: arguments[name].tobytes() for name in before} == before


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


def aligned(a, weight):
    """Return the alignment of the codes of a product of groups."""
    scale = TensorSpec("scale", "float32", (1,), (1,), H200)
    offs = TensorSpec("offs", "int32", weight.shape[:1], (1,), H200)
    return (
        grouped_product_of(a, weight, scale, scale, None, offs, "bfloat16").problem(True, None).product.codes_alignment
    )


@pytest.mark.parametrize(("groups", "stride", "alignment"), [(3, 336, 16), (3, 340, 4), (3, 337, 1), (1, 337, 16)])
def test_the_alignment_holds_for_every_group(groups, stride, alignment):
    """Rows of k=100 that are 112 apart; from one group to the next there may be more."""
    a = TensorSpec("a", "float8_e4m3fn", (ROWS, 100), (112, 1), H200)
    weight = TensorSpec("weight", "float8_e4m3fn", (groups, 3, 100), (stride, 112, 1), H200)
    assert aligned(a, weight) == alignment


@pytest.mark.parametrize(
    ("stride", "n", "bias", "alignment"),
    [(32, 1000, "", 16), (33, 1000, "", 4), (32, 1000, "bfloat16", 16), (32, 1001, "float32", 4)],
)
def test_the_alignment_of_the_scales_of_a_is_their_own(stride, n, bias, alignment):
    """That of the vectors holds for every group, too: the scales of its weight, which are 8 x 4, and its bias."""
    a = TensorSpec("a", "float8_e4m3fn", (ROWS, 512), (512, 1), H200)
    weight = TensorSpec("weight", "float8_e4m3fn", (3, n, 512), (n * 512, 512, 1), H200)
    scale_a = TensorSpec("scale_a", "float32", (ROWS, 4), (4, 1), H200)
    scale_b = TensorSpec("scale_b", "float32", (3, 8, 4), (stride, 4, 1), H200)
    given = TensorSpec("bias", bias, (3, n), (n, 1), H200) if bias else None
    offs = TensorSpec("offs", "int32", (3,), (1,), H200)
    made = grouped_product_of(a, weight, scale_a, scale_b, given, offs, "bfloat16").problem(True, None).product
    assert (made.vectors_alignment, made.scale_a_alignment) == (alignment, 16)
