"""What the shape of a scale can mean: one thing, or it is refused."""

import itertools

import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, GroupShape, ScaleError, ShapeError
from fp8core.core import specs
from fp8core.core.scale_shapes import of_product
from fp8core.target import HOST
from support import reference
from support.engines import assert_same_bytes, fresh, fresh_fp8, fresh_scale

GROUPS = [PER_TENSOR, PER_TOKEN, (1, 64), (1, 96), (1, 32), (6, 25), (-1, 32), (-1, 1), (128, 128), (3, -1), (1, 1)]


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("shape", [(10, 96), (10, 192), (10, 50), (7, 100), (1, 128), (256, 64)], ids=str)
def test_what_was_quantized_is_dequantized_by_its_own_groups(group, shape):
    x = fresh(shape, "float32")
    q = fp8core.quantize(x, group_shape=group)
    assert q.group_shape == GroupShape(*group)
    scale = q.scale.reshape(1, 1) if group == PER_TENSOR else q.scale
    want = reference.dequantize(q.data.view(np.uint8), "float8_e4m3fn", scale, tuple(group))
    for got in (q.dequantize(), fp8core.dequantize(q), fp8core.dequantize(*q, group_shape=q.group_shape)):
        np.testing.assert_array_equal(got, want)
    counts = q.scale.shape if group != PER_TENSOR else (1, 1)
    if all(count in (1, extent) for count, extent in zip(counts, shape, strict=True)):
        np.testing.assert_array_equal(fp8core.dequantize(*q), want)
    else:
        with pytest.raises(ScaleError, match="group_shape"):
            fp8core.dequantize(*q)


@pytest.mark.parametrize(("group", "cols"), [((1, 64), 96), ((1, 96), 192), ((1, 32), 100), ((6, 25), 50)])
def test_a_scale_that_several_groups_explain_needs_its_group_shape(group, cols):
    data, scale = fp8core.quantize(fresh((12, cols)), group_shape=group)
    with pytest.raises(ScaleError, match="needs group_shape where it has fewer scales than elements"):
        fp8core.dequantize(data, scale)


@pytest.mark.parametrize("shape", [(3, 1), (1, 5), (4, 0), (5, 1)])
def test_a_scale_that_no_groups_explain_is_refused_for_its_shape(shape):
    with pytest.raises(ShapeError, match=r"scale needs .* scale per .*, got \d along"):
        fp8core.dequantize(fp8core.quantize(fresh((4, 7))).data, np.ones(shape, np.float32))


def test_a_pair_is_a_pair_and_knows_more():
    x = fresh((4, 256))
    q = fp8core.quantize(x, group_shape=GROUP_128)
    data, scale = q
    assert data is q.data
    assert scale is q.scale
    assert (q.dtype, q.shape, q.group_shape) == ("float8_e4m3fn", (4, 256), GROUP_128)
    assert "group_shape=(1, 128)" in repr(q)
    assert q.T.data.shape == (256, 4)
    assert q.T.group_shape == (128, 1)
    with pytest.raises(ScaleError, match="group_shape needs to be that of q"):
        fp8core.dequantize(q, group_shape=PER_TOKEN)
    with pytest.raises(ScaleError, match="scale needs to be left out"):
        fp8core.dequantize(q, scale)


@pytest.mark.parametrize(
    ("group", "shape", "want"),
    [
        (PER_TENSOR, (4, 8, 256), (1,)),
        (PER_TOKEN, (4, 8, 256), (4, 8, 1)),
        ((1, 64), (4, 8, 1024), (4, 8, 16)),
        (GROUP_128, (2, 3, 4, 200), (2, 3, 4, 2)),
        (BLOCK_128, (2, 128, 200), (2, 1, 2)),
        (BLOCK_128, (1, 200, 200), (1, 2, 2)),
        ((4, 32), (3, 8, 64), (3, 2, 2)),
        (PER_TOKEN, (256,), (1,)),
        (GROUP_128, (256,), (2,)),
        (BLOCK_128, (256,), (2,)),
        ((-1, 64), (256,), (4,)),
        (PER_TOKEN, (0, 8, 256), (0, 8, 1)),
    ],
)
@pytest.mark.parametrize("layout", ["k", "mn"])
def test_scales_have_the_leading_axes_of_x(group, shape, want, layout):
    x = fresh(shape, "float32")
    q = fp8core.quantize(x, group_shape=group, scale_layout=layout)
    assert q.scale.shape == want
    if x.size:
        flat = fp8core.quantize(x.reshape(-1, shape[-1]), group_shape=group)
        np.testing.assert_array_equal(q.scale.reshape(flat.scale.shape), flat.scale)
        np.testing.assert_array_equal(q.dequantize().reshape(flat.data.shape), flat.dequantize())
        again = fp8core.quantize(x, group_shape=group, scale=q.scale)
        assert_same_bytes(
            again.data,
            fp8core.quantize(x.reshape(-1, shape[-1]), group_shape=group, scale=flat.scale).data.reshape(shape),
        )


@pytest.mark.parametrize(("group", "shape"), [(BLOCK_128, (4, 100, 128)), ((3, 32), (4, 8, 64)), ((-1, 1), (4, 8, 64))])
def test_groups_that_would_cross_leading_axes_are_refused(group, shape):
    with pytest.raises(ShapeError, match="stay within the last two axes"):
        fp8core.quantize(fresh(shape), group_shape=group)


@pytest.mark.parametrize(
    "group",
    [None, 128, "token", (1, 2, 3), (1.5, 128), (0, 128), (1, -2), (False, 128), (1, None), (1,), (1, np.inf)],
    ids=repr,
)
def test_what_is_no_group_shape_is_refused(group):
    x = fresh((4, 256))
    for call in (
        lambda: fp8core.quantize(x, group_shape=group),
        lambda: fp8core.linear(x, fresh_fp8((8, 256)), 0.5, group_shape=group),
        lambda: fp8core.Fp8Linear.from_weight(fresh((8, 256)), group_shape=group),
        lambda: fp8core.Fp8Linear.from_weight(fresh((8, 256)), weight_group_shape=group),
    ):
        with pytest.raises(ShapeError, match=r"group_shape needs a pair of whole numbers.*got"):
            call()


@pytest.mark.parametrize("group", [(1, 96), (1, 64), (96, 96), (-1, 1), (2, -1)], ids=str)
def test_products_refuse_groups_that_they_do_not_have(group):
    x, weight = fresh((192, 192)), fp8core.quantize(fresh((192, 192)), group_shape=group)
    with pytest.raises(ScaleError, match=r"group_shape"):
        fp8core.linear(x, fresh_fp8((192, 192)), fresh_scale((2, 2)), group_shape=group)
    with pytest.raises(ScaleError, match=r"group_shape"):
        fp8core.Fp8Linear.from_weight(fresh((192, 192)), weight_group_shape=group, group_shape=GROUP_128)
    for call in (
        lambda: fp8core.linear(x, weight, group_shape=GROUP_128),
        lambda: fp8core.Fp8Linear(weight, group_shape=GROUP_128),
        lambda: fp8core.scaled_mm_nt(fp8core.quantize(x, group_shape=GROUP_128), weight),
        lambda: fp8core.scaled_mm_nt(weight, fp8core.quantize(x)),
        lambda: fp8core.linear(weight, fp8core.quantize(x)),
    ):
        with pytest.raises(ScaleError, match=r"group_shape beside \w+ needs one of"):
            call()


PAIRS = [
    (PER_TENSOR, PER_TENSOR),
    (PER_TOKEN, PER_TENSOR),
    (PER_TENSOR, PER_CHANNEL),
    (PER_TOKEN, PER_CHANNEL),
    (GROUP_128, BLOCK_128),
    (GROUP_128, GROUP_128),
]


@pytest.mark.parametrize(("of_a", "of_b"), PAIRS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(3, 5, 200), (128, 128, 128), (1, 128, 256), (128, 1, 300), (5, 128, 16384)])
def test_products_of_pairs_are_those_of_what_the_pairs_mean(of_a, of_b, m, n, k):
    a = fp8core.quantize(fresh((m, k), "float32", spread=1), group_shape=of_a)
    b = fp8core.quantize(fresh((n, k), "float32", spread=1), group_shape=of_b)
    want = a.dequantize().astype(np.float64) @ b.dequantize().astype(np.float64).T
    results = [
        fp8core.scaled_mm_nt(a, b, out_dtype="float32"),
        fp8core.scaled_mm(a, b.T, out_dtype="float32"),
        fp8core.scaled_mm_nt(*(a.data, b.data), *(a.scale, b.scale), out_dtype="float32"),
        fp8core.linear(a, b, out_dtype="float32"),
        fp8core.Fp8Linear(b, group_shape=of_a, out_dtype="float32")(a),
    ]
    for got in results:
        assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)


def test_pairs_that_do_not_go_together_are_refused():
    x, w = fresh((4, 256)), fresh((8, 256))
    by_a = [fp8core.quantize(x, group_shape=group) for group in (PER_TENSOR, PER_TOKEN, GROUP_128)]
    by_b = [fp8core.quantize(w, group_shape=group) for group in (PER_TENSOR, PER_CHANNEL, BLOCK_128, GROUP_128)]
    for a, b in itertools.product(by_a, by_b):
        if (a.group_shape == GROUP_128) == (b.group_shape in (BLOCK_128, GROUP_128)):
            continue
        with pytest.raises(ScaleError, match=r"scale.* needs .*scale"):
            fp8core.scaled_mm_nt(a, b)


@pytest.mark.parametrize(
    ("group", "shape"),
    [
        (PER_TENSOR, (5, 1)),
        (PER_TENSOR, (5,)),
        (PER_TENSOR, (5, 2)),
        (PER_TOKEN, (5, 2)),
        (GROUP_128, (5, 1)),
        (GROUP_128, (5,)),
        (GROUP_128, (1, 1)),
        (GROUP_128, ()),
    ],
    ids=str,
)
def test_a_scale_of_a_that_is_not_of_its_stated_groups_is_refused(group, shape):
    a, weight = fp8core.Quantized(fresh_fp8((5, 200)), fresh_scale(shape), group), fp8core.quantize(fresh((6, 200)))
    with pytest.raises(
        ShapeError, match=r"^scale_a for m=5, k=200 needs shape \(.*\) (or .* )?(for|per) \w+( of 1x128)?, got"
    ):
        fp8core.scaled_mm_nt(a, weight)


@pytest.mark.parametrize(
    ("group", "shape"),
    [
        (PER_TENSOR, (6, 1)),
        (PER_TENSOR, (6,)),
        (PER_TENSOR, (1, 2)),
        (PER_CHANNEL, (6, 2)),
        (PER_CHANNEL, (1, 2)),
        (PER_CHANNEL, (2, 1)),
        (PER_CHANNEL, (1,)),
        (BLOCK_128, (6, 2)),
        (BLOCK_128, (6, 1)),
        (BLOCK_128, (6,)),
        (BLOCK_128, (1, 1)),
        (GROUP_128, (1, 2)),
        (GROUP_128, (2, 1)),
        (GROUP_128, (6, 1)),
        (GROUP_128, (6,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("of_a", [PER_TENSOR, PER_TOKEN, GROUP_128], ids=str)
def test_a_scale_of_a_weight_that_is_not_of_its_stated_groups_is_refused(group, shape, of_a):
    a = fp8core.quantize(fresh((5, 200)), group_shape=of_a)
    weight = fp8core.Quantized(fresh_fp8((6, 200)), fresh_scale(shape), group)
    with pytest.raises(ShapeError, match=r"^scale_b for n=6, k=200 needs shape \(.*, got"):
        fp8core.scaled_mm_nt(a, weight)


@pytest.mark.parametrize("shape", [(5, 1), (4, 9), (1, 9), (4, 1, 1, 1)])
def test_a_scale_with_more_numbers_than_elements_fits_no_groups(shape):
    error, needs = (
        (ScaleError, "group_shape to say") if len(shape) > 2 else (ShapeError, "at most one scale per element")
    )
    with pytest.raises(error, match=f"^scale needs {needs}"):
        fp8core.dequantize(fresh_fp8((4, 8)), fresh_scale(shape))


@pytest.mark.parametrize(
    ("group", "flat", "matrix"),
    [((1, -1), (6,), (6, 1)), ((-1, 1), (8,), (1, 8)), ((-1, 4), (2,), (1, 2)), ((2, -1), (3,), (3, 1))],
)
def test_a_vector_of_scales_is_read_along_the_only_axis_that_has_several(group, flat, matrix):
    x, memory = fresh((6, 8)), fresh_scale((16,))
    scale = memory[::2][: flat[0]]
    want = fp8core.quantize(x, group_shape=group, scale=np.ascontiguousarray(scale).reshape(matrix))
    assert_same_bytes(fp8core.quantize(x, group_shape=group, scale=scale).data, want.data)
    np.testing.assert_array_equal(fp8core.dequantize(want.data, scale, group_shape=group), want.dequantize())


def test_a_vector_of_scales_is_not_read_along_two_axes():
    with pytest.raises(ShapeError, match=r"^scale of x\(6, 8\) by groups \(2, 4\) needs shape \(3, 2\), got \(6,\)"):
        fp8core.quantize(fresh((6, 8)), group_shape=(2, 4), scale=fresh_scale((6,)))


def test_a_vector_of_block_scales_beside_groups_is_blocks():
    a = fp8core.quantize(fresh((4, 16384), "float32", spread=1), group_shape=GROUP_128)
    b = fp8core.quantize(fresh((128, 16384), "float32", spread=1), group_shape=BLOCK_128)
    got = fp8core.scaled_mm(a.data, b.data.T, a.scale, b.scale.T, out_dtype="float32")
    want = a.dequantize().astype(np.float64) @ b.dequantize().astype(np.float64).T
    assert b.scale.T.shape == (128, 1)
    assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)


def apart(x):
    """Return the array with gaps along every axis, each of another size."""
    steps = range(3, 3 + x.ndim)
    memory = np.full([extent * step for extent, step in zip(x.shape, steps, strict=True)], np.nan, np.float32)
    view = memory[tuple(slice(None, None, step) for step in steps)]
    view[...] = x
    return view


@pytest.mark.parametrize(
    ("n", "k", "of_b", "shape", "stored"),
    [
        (200, 300, PER_CHANNEL, (200, 1), True),
        (200, 300, PER_CHANNEL, (200,), True),
        (200, 300, PER_CHANNEL, (1, 200), False),
        (200, 300, PER_CHANNEL, (200,), False),
        (200, 300, PER_CHANNEL, (200, 1), False),
        (200, 300, BLOCK_128, (2, 3), True),
        (200, 300, BLOCK_128, (3, 2), False),
        (200, 300, GROUP_128, (200, 3), True),
        (200, 300, GROUP_128, (3, 200), False),
        (100, 300, BLOCK_128, (3, 1), True),  # a vector of blocks in the other orientation
        (100, 300, BLOCK_128, (1, 3), False),
    ],
    ids=str,
)
def test_scales_with_gaps_are_read_in_every_shape(n, k, of_b, shape, stored):
    groups = -(-k // 128)
    of_a = [(4, 1), (4,)] if of_b == PER_CHANNEL else [(4, groups)]
    a, weight, scale_b = fresh_fp8((4, k)), fresh_fp8((n, k)), fresh_scale(shape)
    stored_shape = of_b.scale_shape(n, k)
    as_stored = scale_b.reshape(stored_shape) if 1 in stored_shape or stored else scale_b.T
    for shape_a in of_a:
        scale_a = fresh_scale(shape_a)
        spread_a = reference.spread(scale_a.reshape(4, -1), (1, 128 if groups == scale_a.size // 4 else -1), (4, k))
        spread_b = reference.spread(as_stored, tuple(of_b), (n, k))
        want = (a.astype(np.float64) * spread_a) @ (weight.astype(np.float64) * spread_b).T
        function, b = (fp8core.scaled_mm_nt, weight) if stored else (fp8core.scaled_mm, weight.T)
        got = function(a, b, apart(scale_a), apart(scale_b), out_dtype="float32")
        assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)


def test_grouped_products_refuse_scales_that_are_not_of_their_stated_groups():
    a, weight = fresh_fp8((5, 200)), fresh_fp8((2, 6, 200))
    offs = np.array([2, 5], np.int32)
    with pytest.raises(ShapeError, match=r"^scale_a for m=5, k=200 needs shape \(5, 2\)"):
        fp8core.grouped_scaled_mm_nt(fp8core.Quantized(a, fresh_scale((5, 1)), GROUP_128), weight, None, 1.0, offs=offs)
    by_channel = fp8core.Quantized(weight, fresh_scale((2, 6, 1)), BLOCK_128)
    with pytest.raises(ShapeError, match=r"^scale_b\[i\] for n=6, k=200 needs shape \(1, 2\)"):
        fp8core.grouped_scaled_mm_nt(a, by_channel, fresh_scale((5, 2)), offs=offs)


@pytest.mark.parametrize("group", [PER_TENSOR, PER_TOKEN, GROUP_128], ids=str)
def test_one_number_is_the_scale_of_all_of_x_whatever_its_groups(group):
    x, weight = fresh_fp8((4, 256)), fp8core.quantize(fresh((8, 256)), group_shape=PER_TENSOR)
    for scale in (0.5, np.full((1, 1), 0.5, np.float32)):
        got = fp8core.linear(x, weight, input_scale=scale, group_shape=group)
        assert_same_bytes(got, fp8core.linear(x, weight, input_scale=0.5))


def test_the_groups_of_codes_are_those_that_were_stated_or_of_their_scale():
    q, weight = (
        fp8core.quantize(fresh((4, 256)), group_shape=GROUP_128),
        fp8core.quantize(fresh((8, 256)), group_shape=BLOCK_128),
    )
    want = fp8core.linear(q, weight)
    for options in ({}, {"group_shape": GROUP_128}):
        assert_same_bytes(fp8core.linear(q.data, weight, input_scale=q.scale, **options), want)
    with pytest.raises(ShapeError, match="input_scale for m=4, k=256 needs shape"):
        fp8core.linear(q.data, weight, input_scale=q.scale, group_shape=PER_TENSOR)


def test_a_vector_of_scales_that_could_be_of_channels_is_not_of_blocks():
    with pytest.raises(ShapeError, match="scale_b for n=2, k=256"):
        fp8core.scaled_mm_nt(fresh_fp8((4, 256)), fresh_fp8((2, 256)), fresh_scale((4, 2)), fresh_scale((2, 1)))


@pytest.mark.parametrize("k", [100, 128, 129])
@pytest.mark.parametrize("of_b", [PER_TENSOR, PER_CHANNEL, BLOCK_128, GROUP_128], ids=str)
@pytest.mark.parametrize("of_a", [PER_TENSOR, PER_TOKEN, GROUP_128], ids=str)
def test_up_to_one_block_of_k_a_group_is_a_row(of_a, of_b, k):
    a = fp8core.quantize(fresh((4, k), "float32"), group_shape=of_a)
    b = fp8core.quantize(fresh((200, k), "float32"), group_shape=of_b)
    grouped = of_b in (BLOCK_128, GROUP_128)
    if k > 128 and (of_a == GROUP_128) != grouped:
        with pytest.raises(ScaleError, match=r"^scale_[ab] (for|with) "):
            fp8core.scaled_mm_nt(a, b)
        return
    want = a.dequantize().astype(np.float64) @ b.dequantize().astype(np.float64).T
    got = fp8core.scaled_mm_nt(a, b, out_dtype="float32")
    assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)
    problem = fp8core.explain(fp8core.scaled_mm_nt, a, b, target="sm_90").problem
    assert (problem.scale_a == "group") == grouped == (problem.scale_b in ("block", "group"))


def test_a_vector_of_block_scales_in_the_other_orientation_needs_groups_of_a():
    a, b = fresh_fp8((4, 100)), fresh_fp8((300, 100))
    with pytest.raises(ShapeError, match="orientation of the stored weight"):
        fp8core.scaled_mm_nt(a, b, 1.0, fresh_scale((1, 3)))


def test_a_row_beside_a_stored_weight_is_no_scale_of_its_channels():
    with pytest.raises(ShapeError, match="orientation of the stored weight"):
        fp8core.scaled_mm_nt(fresh_fp8((4, 64)), fresh_fp8((64, 64)), 1.0, fresh_scale((1, 64)))


@pytest.mark.parametrize("of_b", [(), (1,), (5, 1), (5,), (5, 0), (1, 0)], ids=str)
def test_scales_without_elements_are_not_read(of_b):
    """At k = 0 a scale by groups has no elements: neither it nor what lies where it would be comes into the result."""
    memory = np.full(64, np.nan, np.float32)
    scale_a, scale_b = memory[:12].reshape(3, 4)[:, :0], np.ones(of_b, np.float32)
    a, weight, bias = fresh_fp8((3, 0)), fresh_fp8((5, 0)), fresh((5,), "float32")
    got = fp8core.scaled_mm_nt(a, weight, scale_a, scale_b, bias=bias, out_dtype="float32")
    np.testing.assert_array_equal(got, np.broadcast_to(bias, (3, 5)))
    spec = lambda x, name: specs.TensorSpec(name, "float32", x.shape, (1,) * x.ndim, HOST)  # noqa: E731
    readings = of_product(spec(scale_a, "scale_a"), spec(scale_b, "scale_b"), (3,), 3, 5, 0, stored=True)
    assert {reading.granularity for reading in readings} <= {"group", "block"}
