"""Which scales `grouped_scaled_mm_nt` refuses: the error, its whole message, and that nothing was written."""

import pytest

from core.grouped_calls import GROUPS, ROWS, K, N, check_refused, per_channel
from fp8core import ScaleError, ShapeError
from support.engines import fresh_fp8, fresh_scale

REFUSED = {
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
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_scales_are_refused(case):
    check_refused(*REFUSED[case])
