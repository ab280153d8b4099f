"""What products and linear layers refuse: the right exception, the operand and what was needed, nothing written."""

import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN
from support.engines import BOTH, engines, fresh, fresh_fp8, fresh_scale

ONE = np.ones(1, np.float32)


def amax_in_bias(at):
    """Return a bias, and an amax that is one of its elements."""
    bias = np.ones(32, np.float32)
    return {"bias": bias, "amax": bias[at : at + 1]}


def product(**changes):
    """Return the arguments of a good product, with changes."""
    return {
        "a": fresh_fp8((4, 64)),
        "b": fresh_fp8((32, 64)).T,
        "scale_a": ONE,
        "scale_b": ONE,
        **changes,
    }


PRODUCT = {
    "k differs": (
        lambda: {"b": fresh_fp8((32, 65)).T},
        fp8core.ShapeError,
        r"share k, got a .*\(4, 64\) and b .*\(65, 32\)$",
    ),
    "bias in FP8": (
        lambda: {"bias": fresh_fp8((32,)), "out_dtype": "float8_e4m3fn", "out_scale": 1.0},
        fp8core.DTypeError,
        "bias needs float32, got float8_e4m3fn",
    ),
    "amax in the bias": (lambda: amax_in_bias(5), fp8core.LayoutError, "amax needs memory of its own.*overlaps bias"),
    "a is bfloat16": (lambda: {"a": fresh((4, 64))}, fp8core.DTypeError, "a needs an FP8"),
    "b is bfloat16": (lambda: {"b": fresh((32, 64)).T}, fp8core.DTypeError, "b needs an FP8"),
    "b has rows": (lambda: {"b": fresh_fp8((64, 32))}, fp8core.LayoutError, "b needs contiguous columns"),
    "b has three axes": (lambda: {"b": fresh_fp8((1, 64, 32))}, fp8core.ShapeError, "b needs two axes"),
    "a has strided columns": (lambda: {"a": fresh_fp8((4, 128))[:, ::2]}, fp8core.LayoutError, "a needs"),
    "both e5m2": (
        lambda: {"a": fresh_fp8((4, 64), "float8_e5m2"), "b": fresh_fp8((32, 64), "float8_e5m2").T},
        fp8core.UnsupportedProblemError,
        "e5m2",
    ),
    "scale_a of the wrong length": (lambda: {"scale_a": fresh_scale((5, 1))}, fp8core.ShapeError, r"scale_a.*\(4, 1\)"),
    "scale_b of the wrong length": (
        lambda: {"scale_b": fresh_scale((1, 31))},
        fp8core.ShapeError,
        r"scale_b.*\(1, 32\)",
    ),
    "scale_a in fp16": (lambda: {"scale_a": np.ones(1, np.float16)}, fp8core.DTypeError, "scale_a needs float32"),
    "bias of the wrong length": (lambda: {"bias": fresh((31,))}, fp8core.ShapeError, "bias needs 32"),
    "bias of the wrong dtype": (lambda: {"bias": fresh((32,), "float16")}, fp8core.DTypeError, "bias needs"),
    "out_dtype of integers": (lambda: {"out_dtype": "int32"}, fp8core.DTypeError, "int32"),
    "FP8 without out_scale": (lambda: {"out_dtype": "float8_e4m3fn"}, fp8core.ScaleError, "out_scale"),
    "out_scale without FP8": (lambda: {"out_scale": ONE}, fp8core.ScaleError, "out_scale"),
    "out of the wrong shape": (lambda: {"out": fresh((4, 33))}, fp8core.ShapeError, r"out needs shape \(4, 32\)"),
    "out of the wrong dtype": (lambda: {"out": fresh((4, 32), "float16")}, fp8core.DTypeError, "out needs bfloat16"),
    "beta that float32 has as zero": (
        lambda: {"beta": 1e-60, "out": fresh((4, 32))},
        fp8core.ScaleError,
        "beta needs a finite number that float32 holds",
    ),
    "beta of no number": (
        lambda: {"beta": float("nan"), "out": fresh((4, 32))},
        fp8core.ScaleError,
        "beta needs a finite number",
    ),
    "infinite beta": (
        lambda: {"beta": -float("inf"), "out": fresh((4, 32))},
        fp8core.ScaleError,
        "beta needs a finite number",
    ),
    "out_scale of two": (
        lambda: {"out_dtype": "float8_e4m3fn", "out_scale": np.ones(2, np.float32)},
        fp8core.ShapeError,
        "out_scale needs one number",
    ),
    "out_scale in fp16": (
        lambda: {"out_dtype": "float8_e4m3fn", "out_scale": np.ones(1, np.float16)},
        fp8core.DTypeError,
        "out_scale needs float32",
    ),
    "scale_b in fp16": (lambda: {"scale_b": np.ones(1, np.float16)}, fp8core.DTypeError, "scale_b needs float32"),
    "b has overlapping rows": (
        lambda: {"b": np.lib.stride_tricks.as_strided(fresh_fp8((32, 64)), (32, 64), (63, 1)).T},
        fp8core.LayoutError,
        "b needs contiguous columns",
    ),
    "amax of two": (lambda: {"amax": np.ones(2, np.float32)}, fp8core.ShapeError, "amax"),
}


@pytest.mark.parametrize("case", PRODUCT)
def test_scaled_mm_refuses(case):
    change, error, words = PRODUCT[case]
    changed = change()
    arguments = product(**changed)
    out = arguments.get("out")
    before = None if out is None else out.tobytes()
    with pytest.raises(error, match=words):
        fp8core.scaled_mm(**arguments)
    assert out is None or out.tobytes() == before


def test_block_scales_in_the_other_orientation_are_refused_with_the_shape_that_was_needed():
    a, weight = fresh_fp8((4, 512)), fresh_fp8((256, 512))
    groups, blocks = fresh_scale((4, 4)), fresh_scale((2, 4))
    with pytest.raises(fp8core.ShapeError, match=r"\(4, 2\).*orientation \[k, n\], got \(2, 4\)"):
        fp8core.scaled_mm(a, weight.T, groups, blocks)
    with pytest.raises(fp8core.ShapeError, match=r"\(2, 4\).*stored weight.*got \(4, 2\)"):
        fp8core.scaled_mm_nt(a, weight, groups, np.ascontiguousarray(blocks.T))
    assert fp8core.scaled_mm_nt(a, weight, groups, blocks).shape == (4, 256)


def test_blocks_of_the_weight_need_groups_of_the_tokens():
    q = fp8core.quantize(fresh((256, 256)), group_shape=BLOCK_128)
    with pytest.raises(fp8core.ScaleError, match=r"group_shape=\(1, 128\)"):
        fp8core.linear(fresh((3, 256)), q.data, q.scale, group_shape=PER_TOKEN)


def test_linear_of_fp8_needs_the_scale_of_its_input():
    q = fp8core.quantize(fresh((32, 64)))
    with pytest.raises(fp8core.ScaleError, match="input_scale"):
        fp8core.linear(q.data, q.data, q.scale)


def test_strides_of_a_weight_without_rows_have_no_meaning():
    weight = fresh_fp8((0, 128))[:, ::2]
    assert fp8core.scaled_mm_nt(fresh_fp8((4, 64)), weight, 1.0, 1.0).shape == (4, 0)


@pytest.mark.parametrize("weight", [fresh_fp8((64, 1)).T, fresh_fp8((8, 0))[::-1]], ids=["a row", "rows of nothing"])
def test_nor_have_those_from_row_to_row_where_there_is_one_or_rows_have_nothing(weight):
    n, k = weight.shape
    a = fresh_fp8((4, k))
    made = fp8core.scaled_mm_nt(a, weight, ONE, ONE, out_dtype="float32")
    np.testing.assert_array_equal(made, fp8core.scaled_mm_nt(a, weight.copy(), ONE, ONE, out_dtype="float32"))
    assert made.shape == (4, n)


def test_a_layer_refuses_a_scale_that_is_not_of_the_stated_groups_of_its_input():
    x = fp8core.Quantized(fresh_fp8((4, 200)), fresh_scale((4, 1)), PER_TENSOR)
    layer = fp8core.Fp8Linear(fresh_fp8((8, 200)), 0.5)
    for _ in range(2):
        with pytest.raises(fp8core.ShapeError, match="input_scale for m=4, k=200 needs shape"):
            layer(x)


@pytest.mark.parametrize(
    ("group_shape", "shape"),
    [
        (PER_TENSOR, (4, 1)),
        (PER_TENSOR, (4,)),
        (PER_TOKEN, (4, 2)),
        (PER_TOKEN, (1, 2)),
        (GROUP_128, (4, 1)),
        (GROUP_128, (2,)),
        (GROUP_128, (4, 3)),
    ],
    ids=str,
)
def test_a_layer_refuses_a_scale_that_no_input_of_its_groups_has(group_shape, shape):
    with pytest.raises(fp8core.ShapeError, match=r"^input_scale needs one number, of shape .*, got shape"):
        fp8core.Fp8Linear(fresh_fp8((8, 200)), 0.5, input_scale=fresh_scale(shape), group_shape=group_shape)


def of_codes(x, weight, **options):
    """Return the product of codes that are given apart from their scale."""
    return fp8core.linear(x.data, weight, input_scale=x.scale, **options)


@pytest.mark.parametrize(("given", "wrong"), [((1, 128), (-1, -1)), ((1, -1), (-1, -1)), ((1, -1), (1, 128))], ids=str)
def test_linear_refuses_another_group_shape_than_that_of_codes(given, wrong):
    x = fp8core.quantize(fresh((4, 256)), group_shape=given)
    weight = fp8core.quantize(fresh((8, 256)), group_shape=BLOCK_128 if given == GROUP_128 else PER_TOKEN)
    want = fp8core.scaled_mm_nt(x, weight)
    for group_shape in (given, PER_TOKEN):  # the default
        np.testing.assert_array_equal(fp8core.linear(x, weight, group_shape=group_shape), want)
        np.testing.assert_array_equal(of_codes(x, weight, group_shape=group_shape), want)
    with pytest.raises(fp8core.ScaleError, match=r"group_shape needs to be that of x, \(1, .*\), or left out, got "):
        fp8core.linear(x, weight, group_shape=wrong)
    with pytest.raises(fp8core.ShapeError, match=r"input_scale for m=4, k=256 needs shape .*, got"):
        of_codes(x, weight, group_shape=wrong)


def test_every_error_is_the_library_s_and_python_s():
    for error in (fp8core.ShapeError, fp8core.LayoutError, fp8core.DeviceError, fp8core.ScaleError):
        assert issubclass(error, fp8core.Fp8Error)
        assert issubclass(error, ValueError)
    assert issubclass(fp8core.UnsupportedProblemError, ValueError)
    assert issubclass(fp8core.DTypeError, TypeError)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("rows", "channels"), [(0, 8), (4, 0)])
@pytest.mark.parametrize(("more", "dtype"), [((1, 0), "float32"), ((0, 1), "float32"), ((0, 0), "float16")])
def test_an_array_that_cannot_hold_results_is_refused_where_there_are_none(rows, channels, quantized, more, dtype):
    x, weight = fresh((rows, 64), "float32"), fp8core.quantize(fresh((channels, 64)))
    out = np.empty((rows + more[0], channels + more[1]), dtype)
    with pytest.raises(fp8core.Fp8Error, match=rf"^out needs (float32|shape \({rows}, {channels}\)), got"):
        fp8core.linear(fp8core.quantize(x) if quantized else x, weight, out=out, out_dtype="float32")


@engines(*BOTH)
def test_explain_refuses_like_the_call(engine):
    with pytest.raises(fp8core.ShapeError, match="share k"):
        fp8core.explain(
            fp8core.scaled_mm,
            **{
                n: engine.array(v) if n != "b" else engine.array(v.T).T
                for n, v in product(b=fresh_fp8((32, 65)).T).items()
            },
        )


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_a_traceback_shows_the_refusal_alone(framework):
    of = {"numpy": "asarray", "torch": "from_numpy", "jax": "asarray"}[framework]
    module = pytest.importorskip("jax.numpy" if framework == "jax" else framework)
    x, weight = fresh((4, 64), "float32"), fp8core.quantize(fresh((8, 64), "float32"))
    fp8core.linear(getattr(module, of)(x), weight)  # a kind of call that is known
    for options in ({"out_dtype": "float7"}, {"group_shape": (1, 64)}):
        with pytest.raises(fp8core.Fp8Error) as refused:
            fp8core.linear(getattr(module, of)(x), weight, **options)
        assert refused.value.__context__ is None
