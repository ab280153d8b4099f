"""`grouped_scaled_mm_nt` against float64, group by group, in every mode, layout and division of the rows."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, ArraySpec, Float8Array
from fp8core.kernels.grouped.table import GROUPED_MM
from fp8core.ops.example_problems import example_grouped
from fp8core.ops.targets import TARGETS, target_of
from support import reference
from support.engines import BOTH, FLOATS, assert_same_bytes, engines, fresh
from support.grouped import MODES, Grouped, ends_of, exact, operands, rows_of
from support.products import EXACT, FAST

STRIDED = "numpy", "torch-cpu", "cupy", "torch-cuda"
"""The engines whose arrays have strides."""
UNEVEN = 0, 5, 130, 1, 0, 64
SIZES = {
    "one group": (17,),
    "even": (32, 32, 32),
    "one row each": (1,) * 20,
    "all rows in one": (0, 0, 77, 0),
    "more groups than rows": (0, 1, 0, 0, 2, 0, 0, 0),
    "no rows": (0, 0, 0),
    "large and small": (300, 3, 129, 0, 128),
}
FEW = "row-row", "group-block", "tensor-each"


def multiplied(engine, of, ends, **options):
    given = {name: engine.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    return engine.numpy(fp8core.grouped_scaled_mm_nt(*of.on(engine), offs=engine.array(ends), **given))


def check(result, want, bound=FAST):
    """Assert that every row of a group is right; rows of no group are not looked at."""
    assert result.shape == want.shape
    inside = ~np.isnan(want).any(1)
    assert reference.relative_error(result[inside], want[inside]) <= bound


@engines(*BOTH)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "shape", [(7, 5), (130, 257), (1, 640), (16, 1), (256, 512), (384, 1024), (96, 128), (264, 144)], ids=str
)
def test_every_mode_and_shape(engine, shape, mode, fast):
    of, ends = operands(len(UNEVEN), sum(UNEVEN), *shape, mode), ends_of(UNEVEN)
    result = multiplied(engine, of, ends, use_fast_accum=fast)
    assert result.dtype == ml_dtypes.bfloat16
    check(result, exact(of, mode, ends), FAST if fast else EXACT)


@engines(*BOTH)
@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("n", "k"), [(128, 256), (50, 300)])
def test_every_division_of_the_rows(engine, n, k, sizes, mode):
    sizes = SIZES[sizes]
    of, ends = operands(len(sizes), sum(sizes), n, k, mode), ends_of(sizes)
    check(multiplied(engine, of, ends, out_dtype="float32"), exact(of, mode, ends))


@engines()
@pytest.mark.parametrize("mode", MODES)
def test_arrays_of_every_framework(engine, mode):
    sizes = 3, 0, 9
    of, ends = operands(3, 12, 80, 272, mode), ends_of(sizes)
    check(multiplied(engine, of, ends), exact(of, mode, ends))


@engines(*BOTH)
@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("out", FLOATS)
@pytest.mark.parametrize("bias", ["out", "float32"])
def test_bias_in_every_dtype(engine, bias, out, mode):
    sizes = 40, 0, 3
    of, ends = operands(3, 43, 96, 256, mode), ends_of(sizes)
    bias = fresh((3, 96), out if bias == "out" else "float32", spread=1)
    result = multiplied(engine, of, ends, bias=bias, out_dtype=out, use_fast_accum=False)
    assert result.dtype == FLOATS[out]
    check(result, exact(of, mode, ends, bias), EXACT)


@engines(*BOTH)
@pytest.mark.parametrize(
    "pair",
    [
        ("float8_e4m3fn", "float8_e5m2"),
        ("float8_e5m2", "float8_e4m3fn"),
        ("float8_e4m3fnuz", "float8_e4m3fnuz"),
        ("float8_e5m2fnuz", "float8_e4m3fn"),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", FEW)
def test_mixed_formats_and_negative_scales(engine, mode, pair):
    of, ends = operands(2, 70, 64, 256, mode, *pair, low=-0.1), ends_of((66, 4))
    check(multiplied(engine, of, ends), exact(of, mode, ends))


@engines()
@pytest.mark.parametrize(
    ("of_a", "of_b", "layout"),
    [
        (PER_TENSOR, PER_TENSOR, "k"),
        (PER_TOKEN, PER_CHANNEL, "k"),
        (PER_TENSOR, PER_CHANNEL, "k"),
        (GROUP_128, BLOCK_128, "k"),
        (GROUP_128, BLOCK_128, "mn"),
        (GROUP_128, GROUP_128, "mn"),
    ],
)
def test_what_quantize_returns(engine, of_a, of_b, layout):
    """Together or as separate arrays, with the same bits."""
    x, experts, ends = fresh((21, 384), spread=1), fresh((3, 256, 384), spread=1), ends_of((1, 0, 20))
    a = fp8core.quantize(engine.array(x), group_shape=of_a, scale_layout=layout)
    weight = fp8core.quantize(engine.array(experts), group_shape=of_b, scale_layout=layout)
    offs = engine.array(ends)
    together = engine.numpy(fp8core.grouped_scaled_mm_nt(a, weight, offs=offs))
    apart = fp8core.grouped_scaled_mm_nt(a.data, weight.data, a.scale, weight.scale, offs=offs)
    assert_same_bytes(engine.numpy(apart), together)
    names = {PER_TENSOR: "tensor", PER_TOKEN: "row", GROUP_128: "group", BLOCK_128: "block"}
    numbers = [engine.numpy(scale).reshape(scale.shape) for scale in (a.scale, weight.scale)]
    codes = [engine.codes(data).view(ml_dtypes.float8_e4m3fn).reshape(data.shape) for data in (a.data, weight.data)]
    mode = f"{names[of_a]}-{names[of_b]}"
    check(together, exact(Grouped(*codes, *numbers), mode, ends))


@engines(*BOTH)
@pytest.mark.parametrize(("of_a", "of_b"), [(PER_TOKEN, PER_CHANNEL), (GROUP_128, BLOCK_128)])
def test_the_only_scale_of_a_weight_may_be_that_of_a_channel_or_block(engine, of_a, of_b):
    a = fp8core.quantize(engine.array(fresh((5, 128))), group_shape=of_a)
    weight = fp8core.quantize(engine.array(fresh((1, 1, 128))), group_shape=of_b)
    assert weight.scale.shape == (1, 1, 1)
    got = fp8core.grouped_scaled_mm_nt(a, weight, offs=engine.array(ends_of((5,))))
    numbers = [engine.numpy(scale).reshape(scale.shape) for scale in (a.scale, weight.scale)]
    codes = [engine.codes(data).view(ml_dtypes.float8_e4m3fn).reshape(data.shape) for data in (a.data, weight.data)]
    check(engine.numpy(got), exact(Grouped(*codes, *numbers), "row-row", ends_of((5,))))


FORMS = {
    "tensor-tensor": ({(), (1,), (1, 1)}, {(), (1,), (1, 1), (1, 1, 1)}),
    "tensor-each": ({(1, 1)}, {(3,), (3, 1), (3, 1, 1)}),
    "row-row": ({(12, 1), (12,)}, {(3, 8, 1), (3, 8)}),
}


@engines(*BOTH)
@pytest.mark.parametrize("mode", FORMS)
def test_every_shape_of_a_scale(engine, mode):
    of, ends = operands(3, 12, 8, 64, mode), ends_of((4, 3, 5))
    want = multiplied(engine, of, ends)
    check(want, exact(of, mode, ends))
    for of_a in FORMS[mode][0]:
        for of_b in FORMS[mode][1]:
            same = of._replace(scale_a=of.scale_a.reshape(of_a), scale_b=of.scale_b.reshape(of_b))
            assert_same_bytes(multiplied(engine, same, ends), want)


@engines(*BOTH)
def test_numbers_as_scales(engine):
    of, ends = operands(2, 5, 32, 64, "tensor-tensor"), ends_of((2, 3))
    of = of._replace(scale_a=np.full(1, 0.5, np.float32), scale_b=np.full(1, 0.25, np.float32))
    a, weight = of.on(engine)[:2]
    result = fp8core.grouped_scaled_mm_nt(a, weight, 0.5, np.float64(0.25), offs=engine.array(ends))
    assert_same_bytes(engine.numpy(result), multiplied(engine, of, ends))


ENDS = {
    "rows after the last end": (2, 9, 11),
    "no group has rows": (0, 0, 0),
    "not monotone": (7, 3, 12),
    "descending": (12, 7, 2),
    "negative": (-5, 4, -1),
    "beyond the rows": (3, 4000, 5000),
    "extreme": (-(2**31), 2**31 - 1, 0),
    "after the rows": (200, 200, 200),
    "many rows": (70, 3, 139),
}


@engines(*STRIDED)
@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("rows", [15, 140])
def test_given_memory_receives_the_rows_of_groups_and_nothing_else(engine, rows, ends, mode):
    ends, n = np.array(ENDS[ends], np.int32), 56
    of = operands(3, rows, n, 192, mode)
    poisoned = engine.array(np.full((rows + 2, n + 24), 77, np.float32))
    out = poisoned[1 : rows + 1, 8 : n + 8]
    a, weight, scale_a, scale_b = of.on(engine)
    offs = engine.array(ends)
    got = fp8core.grouped_scaled_mm_nt(a, weight, scale_a, scale_b, offs=offs, out=out, out_dtype="float32")
    assert got is out
    whole, want = engine.numpy(poisoned), exact(of, mode, ends)
    check(whole[1 : rows + 1, 8 : n + 8], want)
    untouched = np.ones(whole.shape, bool)
    untouched[1 : rows + 1, 8 : n + 8] = np.isnan(want)
    assert (whole[untouched] == 77).all()
    assert engine.numpy(offs).tolist() == ends.tolist()


@engines()
def test_equal_calls_read_the_ends_of_their_own(engine):
    """The second call of a kind is found by its signature, later ones by a shortcut."""
    of = operands(3, 24, 64, 128, "row-row")
    there = of.on(engine)
    for ends in ((8, 16, 24), (0, 24, 24), (24, 24, 24), (5, 5, 24), (1, 2, 24)):
        ends = np.array(ends, np.int32)
        got = fp8core.grouped_scaled_mm_nt(*there, offs=engine.array(ends))
        check(engine.numpy(got), exact(of, "row-row", ends))


@engines(*BOTH)
@pytest.mark.parametrize("mode", ["tensor-tensor", "tensor-each", "row-row", "group-block"])
@pytest.mark.parametrize(
    ("groups", "rows", "n", "k"), [(0, 4, 32, 64), (0, 0, 32, 64), (3, 0, 32, 64), (3, 4, 0, 64), (3, 4, 32, 0)]
)
def test_nothing_to_multiply(engine, groups, rows, n, k, mode):
    of, ends = operands(groups, rows, n, k, mode), np.full(groups, rows, np.int32)
    bias = fresh((groups, n))
    result = multiplied(engine, of, ends, bias=bias)
    assert result.shape == (rows, n)
    if not k:
        assert_same_bytes(result, np.broadcast_to(bias[0], (rows, n)).copy())
        assert not multiplied(engine, of, ends).any()


@engines(*BOTH)
def test_no_groups_leave_memory_alone(engine):
    out = engine.array(np.full((4, 32), 77, np.float32))
    of = operands(0, 4, 32, 64, "tensor-each")
    of = of._replace(scale_b=of.scale_b.reshape(0))
    offs = engine.array(np.zeros(0, np.int32))
    assert fp8core.grouped_scaled_mm_nt(*of.on(engine), offs=offs, out=out, out_dtype="float32") is out
    assert (engine.numpy(out) == 77).all()


def stretched(x, groups):
    """Return a view in which one group stands for all."""
    if hasattr(x, "expand"):
        return x[:1].expand(groups, *x.shape[1:])
    import sys

    return sys.modules[type(x).__module__.partition(".")[0]].broadcast_to(x[:1], (groups, *x.shape[1:]))


VIEWS = {
    "a slice of the groups": (lambda x: x[2:5], lambda x: x[2:5]),
    "every other group": (lambda x: x[:6:2], lambda x: x[:6:2]),
    "rows of larger weights": (lambda x: x[:3, 10:74], lambda x: x[:3]),
    "rows further apart": (lambda x: x[:3, :, 16:272], lambda x: x[:3]),
    "rows at odd addresses": (lambda x: x[:3, :, 3:260], lambda x: x[:3]),
    "one weight for all": (lambda x: stretched(x, 3), lambda x: stretched(x, 3)),
    "one weight with scales for each": (lambda x: stretched(x, 3), lambda x: x[:6:2]),
}


@engines(*STRIDED)
@pytest.mark.parametrize("mode", ["row-row", "tensor-each", "row-tensor"])
@pytest.mark.parametrize("view", VIEWS)
def test_weights_scales_and_biases_that_are_views(engine, view, mode):
    of_weight, of_others = VIEWS[view]
    ends, large = ends_of((3, 50, 6)), operands(7, 59, 96, 300, mode)
    bias = fresh((7, 96), spread=1)
    weight = of_weight(large.weight)
    (_, n, k), shared = weight.shape, mode == "row-tensor"
    scale_b = large.scale_b if shared else of_others(large.scale_b)
    scale_b = scale_b[:, :n] if mode == "row-row" else scale_b
    of = Grouped(np.ascontiguousarray(large.a[:, :k]), weight, large.scale_a, scale_b)
    there = engine.array(large.weight)
    there = Float8Array(of_weight(there.codes), there.dtype) if isinstance(there, Float8Array) else of_weight(there)
    of_b = engine.array(large.scale_b)
    of_b = of_b if shared else of_others(of_b)
    got = fp8core.grouped_scaled_mm_nt(
        engine.array(of.a),
        there,
        engine.array(of.scale_a),
        of_b[:, :n] if mode == "row-row" else of_b,
        offs=engine.array(ends),
        bias=of_others(engine.array(bias))[:, :n],
    )
    check(engine.numpy(got), exact(of, mode, ends, of_others(bias)[:, :n]))


@engines("numpy", "cupy")
def test_scales_and_biases_in_reversed_order(engine):
    of, ends, bias = operands(3, 40, 64, 128, "row-row"), ends_of((30, 4, 6)), fresh((3, 64), spread=1)
    a, weight, scale_a, scale_b = of.on(engine)
    turned = {"offs": engine.array(ends), "bias": engine.array(bias)[::-1]}
    got = fp8core.grouped_scaled_mm_nt(a, weight, scale_a, scale_b[::-1], **turned)
    check(engine.numpy(got), exact(of._replace(scale_b=of.scale_b[::-1]), "row-row", ends, bias[::-1]))


@pytest.mark.parametrize("mode", FEW)
def test_a_group_has_the_bits_of_its_own_product_on_the_host(mode):
    of, ends = operands(4, 60, 100, 300, mode), ends_of((20, 0, 3, 37))
    got = fp8core.grouped_scaled_mm_nt(*of, offs=ends)
    for i, part in enumerate(rows_of(ends, 60)):
        scale_a = of.scale_a if mode == "tensor-each" else of.scale_a[part]
        assert_same_bytes(got[part], fp8core.scaled_mm_nt(of.a[part], of.weight[i], scale_a, of.scale_b[i]))


def test_operands_of_several_frameworks():
    torch = pytest.importorskip("torch")
    of, ends = operands(2, 9, 32, 64, "row-row"), ends_of((4, 5))
    bias = fresh((2, 32))
    want = fp8core.grouped_scaled_mm_nt(*of, offs=ends, bias=bias)
    mixed = fp8core.grouped_scaled_mm_nt(*of[:3], torch.from_numpy(of.scale_b), offs=torch.from_numpy(ends), bias=bias)
    assert_same_bytes(mixed, want)


WHOLE = ArraySpec((64, 512), "float8_e4m3fn")
KERNELS = {
    "whole": (WHOLE, ArraySpec((8, 256, 512), "float8_e4m3fn"), "sm90_grouped"),
    "one group, rows apart": (
        ArraySpec((64, 500), "float8_e4m3fn", strides=(512, 1)),
        ArraySpec((1, 3, 500), "float8_e4m3fn", strides=(1536, 512, 1)),
        "sm90_grouped",
    ),
    "most groups": (WHOLE, ArraySpec((1024, 256, 512), "float8_e4m3fn"), "sm90_grouped"),
    "too many groups": (WHOLE, ArraySpec((1025, 256, 512), "float8_e4m3fn"), None),
    "one weight for all": (WHOLE, ArraySpec((8, 256, 512), "float8_e4m3fn", strides=(0, 512, 1)), "generic_grouped"),
    "groups apart": (WHOLE, ArraySpec((8, 256, 512), "float8_e4m3fn", strides=(1 << 18, 512, 1)), "generic_grouped"),
    "odd k": (ArraySpec((64, 511), "float8_e4m3fn"), ArraySpec((8, 256, 511), "float8_e4m3fn"), "generic_grouped"),
    "fnuz": (ArraySpec((64, 512), "float8_e4m3fnuz"), ArraySpec((8, 256, 512), "float8_e4m3fnuz"), "generic_grouped"),
    "both e5m2": (ArraySpec((64, 512), "float8_e5m2"), ArraySpec((8, 256, 512), "float8_e5m2"), None),
}


@pytest.mark.parametrize("case", KERNELS)
def test_which_kernel_hopper_gets(case):
    a, weight, chosen = KERNELS[case]
    offs = ArraySpec(weight.shape[:1], "int32")
    told = fp8core.explain(fp8core.grouped_scaled_mm_nt, a, weight, 1.0, 1.0, offs=offs, target="sm_90")
    assert told.chosen == chosen
    assert chosen or "e5m2" in case or "needs at most 1024 groups, got 1025" in str(told)


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_is_made_for_hopper_and_another_runs_everywhere(target):
    able, reason = fp8core.capabilities(target)["grouped_mm"]
    own = {"host": "host", "sm_90": "sm90_grouped"}.get(target)
    assert able == (own is not None)
    assert reason == own or "sm90_grouped: needs " in reason
    assert GROUPED_MM.explain(example_grouped(target_of(target))).chosen == (own or "generic_grouped")


cases = st.fixed_dictionaries(
    {
        "ends": st.lists(st.integers(-3, 90), min_size=1, max_size=9),
        "rows": st.integers(0, 80),
        "n": st.one_of(st.integers(1, 200), st.integers(1, 12).map(lambda x: 16 * x)),
        "k": st.one_of(st.integers(1, 300), st.integers(1, 20).map(lambda x: 16 * x)),
        "mode": st.sampled_from(MODES),
    }
)


def fuzzed(engine, case, bound):
    ends = np.array(case["ends"], np.int32)
    of = operands(len(ends), case["rows"], case["n"], case["k"], case["mode"])
    check(multiplied(engine, of, ends, out_dtype="float32"), exact(of, case["mode"], ends), bound)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_any_groups_on_the_host(case):
    from support.engines import NumpyEngine

    fuzzed(NumpyEngine(), case, 1e-5)


@pytest.mark.gpu
@settings(max_examples=80, deadline=None)
@given(case=cases)
def test_any_groups_on_the_gpu(case):
    from support.engines import CupyEngine

    fuzzed(CupyEngine(), case, FAST)
