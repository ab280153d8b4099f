"""The extents that kernels of a GPU count: the largest is taken, and one more is refused or goes to another kernel."""

import pytest

import fp8core
from fp8core import ArraySpec
from fp8core.kernels.weights.shards import capacity_of

FP8 = "float8_e4m3fn"
IN_32_BITS = (1 << 31) - 1
PLACES, TWO_SCALES = ArraySpec((4, 2), "int32"), ArraySpec((2,), "float32")


def many_scales(shards):
    return ArraySpec((shards,), "float32"), [1] * shards


LIMITS = [
    ("moe_unpermute", IN_32_BITS, lambda most: (fp8core.moe_unpermute, ArraySpec((8, most), "bfloat16"), PLACES)),
    ("moe_permute", IN_32_BITS, lambda most: (fp8core.moe_permute, ArraySpec((4, most), FP8), PLACES, 4)),
    ("moe_permute", 1024, lambda experts: (fp8core.moe_permute, ArraySpec((4, 64), FP8), PLACES, experts)),
    ("moe_permute", 1024, lambda each: (fp8core.moe_permute, ArraySpec((4, 8), FP8), ArraySpec((4, each), "int32"), 4)),
    ("dequantize", IN_32_BITS, lambda most: (fp8core.dequantize, ArraySpec((4, most), FP8), 0.5)),
    (
        "requantize",
        IN_32_BITS,
        lambda most: (fp8core.requantize_with_max_scale, ArraySpec((8, most), FP8), TWO_SCALES, [4, 4]),
    ),
    (
        "requantize",
        512,
        lambda shards: (fp8core.requantize_with_max_scale, ArraySpec((shards, 64), FP8), *many_scales(shards)),
    ),
    ("expand", 512, lambda shards: (fp8core.convert_to_channelwise, *many_scales(shards))),
    ("rowwise", 1 << 28, lambda most: (fp8core.quantize, ArraySpec((2, most), "bfloat16"))),
]


def is_able(kernel, function, *arguments, **options):
    verdicts = fp8core.explain(function, *arguments, target="sm_90", **options).verdicts
    return next(verdict for verdict in verdicts if verdict.kernel == kernel).status in ("chosen", "able")


@pytest.mark.parametrize(("kernel", "most", "call"), LIMITS, ids=[f"{kernel} {most}" for kernel, most, _ in LIMITS])
def test_a_kernel_takes_the_largest_extent_that_it_counts_and_no_larger_one(kernel, most, call):
    options = {"group_shape": (1, 128)} if kernel == "rowwise" else {}
    assert is_able(kernel, *call(most), **options)
    assert not is_able(kernel, *call(most + 1), **options)


@pytest.mark.parametrize("group_shape", [(1, 12), (2, -1), (-1, 128)], ids=str)
def test_groups_that_teams_of_threads_cannot_share_go_to_the_fallback(group_shape):
    asked = fp8core.explain(fp8core.quantize, ArraySpec((4, 1536), "bfloat16"), group_shape=group_shape, target="sm_90")
    assert asked.chosen == "elementwise"


def test_a_kernel_holds_as_many_shards_as_it_has_room_for():
    assert [capacity_of(shards) for shards in (1, 8, 9, 64, 65, 512)] == [8, 8, 64, 64, 512, 512]
