"""The host and GPUs that are not in this machine take the same calls, and refuse the others with the same sentence."""

import re
from itertools import product

import pytest

import fp8core
from fp8core import ArraySpec, Fp8Error, GroupShape
from fp8core.core.ahead import plan_ahead
from fp8core.dtypes import FORMATS
from fp8core.target import HOST
from support.ahead import absent, forget
from support.targets import AMPERE, H200, MI300

GPUS = tuple(absent(target) for target in (H200, AMPERE, MI300))
GROUPS = (
    *((-1, -1), (1, -1), (-1, 1), (-1, 128), (128, -1), (2, 8), (128, 128), (3, 40)),
    *((1, cols) for cols in (1, 4, 7, 8, 12, 16, 24, 64, 128, 256, 512)),
)
SHAPES = ((0, 64), (1, 64), (5, 336))


def outcome(function, target, *args, **kwargs):
    """Return the sentences with which a call is refused; none if it is taken."""
    try:
        plan_ahead(function, target, *args, **kwargs)
    except Fp8Error as error:
        rows = re.findall(r" unable: (.*)", str(error))
        others = {row for row in rows if not re.match(r"needs (cuda|hip|host|cuda or hip), got", row)}
        return others if rows else {str(error)}
    return set()


def agree(function, *args, **kwargs):
    """Assert that the host and all GPUs take a call, or that they refuse it and say the same."""
    on_host = outcome(function, HOST, *args, **kwargs)
    for target in GPUS:
        on_gpu = outcome(function, target, *args, **kwargs)
        same = on_host & on_gpu if on_host else not on_gpu
        assert same, f"the host says {on_host or 'yes'}, {target} says {on_gpu or 'yes'}: {args} {kwargs}"


@pytest.fixture(autouse=True)
def _without_plans_of_others():
    yield
    forget()


def scalings(shape, group):
    """Yield the keywords of all ways to scale a result by groups."""
    grid = (1,) if group == (-1, -1) else GroupShape(*group).scale_shape(*shape)
    yield {}
    yield {"scale_format": "ue8m0_bytes"}
    yield from ({"scale": ArraySpec(one, "float32")} for one in ((1,), grid))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantizations_are_taken_or_refused_alike(shape, group, dtype):
    rows, cols = shape
    for options in scalings(shape, group):
        agree(fp8core.quantize, ArraySpec(shape, dtype), group_shape=group, **options)
        agree(fp8core.silu_and_mul_quant, ArraySpec((rows, 2 * cols), dtype), group_shape=group, **options)
        weight = ArraySpec((cols,), dtype)
        agree(fp8core.rms_norm_quant, ArraySpec(shape, dtype), weight, 1e-6, group_shape=group, **options)


@pytest.mark.parametrize(("a", "b"), [*product(FORMATS, repeat=2)])
def test_products_are_taken_or_refused_alike(a, b):
    """With scales of every kind, for matrices with and without elements."""
    for m, n, k in ((5, 256, 384), (5, 0, 128), (0, 17, 128), (5, 17, 0)):
        groups, blocks = -(-k // 128), -(-n // 128)
        for of_a, of_b in product(((1,), (m, 1), (m, groups)), ((1,), (n, 1), (n, groups), (blocks, groups))):
            left, right = ArraySpec((m, k), a), ArraySpec((n, k), b)
            scales = ArraySpec(of_a, "float32"), ArraySpec(of_b, "float32")
            agree(fp8core.scaled_mm_nt, left, right, *scales)
            agree(fp8core.linear, left, right, scales[1], input_scale=scales[0])
            stacked, offs = ArraySpec((3, n, k), b), ArraySpec((3,), "int32")
            of_groups = ArraySpec(of_b if of_b == (1,) else (3, *of_b), "float32")
            agree(fp8core.grouped_scaled_mm_nt, left, stacked, scales[0], of_groups, offs=offs)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("widths", [(), (0,), (3, 0), (2, 1), (1, 1, 2)], ids=str)
def test_fused_weights_are_taken_or_refused_alike(widths, count):
    scale = ArraySpec((count,), "float32")
    agree(fp8core.convert_to_channelwise, scale, widths)
    for rows in {sum(widths), 3}:
        agree(fp8core.requantize_with_max_scale, ArraySpec((rows, 16), "float8_e4m3fn"), scale, widths)
