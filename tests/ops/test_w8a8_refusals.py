"""What the functions of `fp8core.w8a8` refuse, by vLLM's names of arguments."""

import re

import numpy as np
import pytest

import fp8core
from fp8core import w8a8
from fp8core.errors import DTypeError, Fp8Error, LayoutError, ScaleError, ShapeError
from support.engines import engines, fresh, fresh_fp8, fresh_scale


def test_scaled_fp8_quant_refuses_groups_that_contradict_other_arguments():
    x = fresh((4, 256))
    for group_shape in (None, (1, -1), [1, -1]):
        assert w8a8.scaled_fp8_quant(x, use_per_token_if_dynamic=True, group_shape=group_shape)[1].shape == (4, 1)
    assert w8a8.scaled_fp8_quant(x, scale_ub=1.0, group_shape=[-1, -1])[1] == np.abs(x).max() / np.float32(448)
    with pytest.raises(fp8core.ScaleError, match=r"group_shape needs \(1, -1\) where use_per_token_if_dynamic is set"):
        w8a8.scaled_fp8_quant(x, use_per_token_if_dynamic=True, group_shape=(1, 128))
    with pytest.raises(fp8core.ScaleError, match="scale_ub needs group_shape"):
        w8a8.scaled_fp8_quant(x, scale_ub=1.0, group_shape=(1, 128))
    with pytest.raises(ShapeError, match="group_shape needs a pair of whole numbers"):
        w8a8.scaled_fp8_quant(x, group_shape=np.array([1, 128]))


@pytest.mark.parametrize("wrong", ["no", 2, np.ones(2)], ids=repr)
def test_use_per_token_if_dynamic_is_true_or_false(wrong):
    x, weight = fresh((4, 256)), fresh_fp8((64, 256)).T
    for call in (
        lambda: w8a8.scaled_fp8_quant(x, use_per_token_if_dynamic=wrong),
        lambda: w8a8.Fp8LinearOp(use_per_token_if_dynamic=wrong).apply(x, weight, 1.0),
        lambda: w8a8.Fp8LinearOp().apply(x, weight, 1.0, use_per_token_if_dynamic=wrong),
    ):
        with pytest.raises(DTypeError, match="use_per_token_if_dynamic needs True or False, got"):
            call()


GROUP_SHAPE = (-1, -1)  # vLLM's GroupShape.PER_TENSOR is such a tuple, and true


@pytest.mark.parametrize(
    ("name", "call"),
    [
        # SGLang has no scale_ub: its fourth argument is use_per_token_if_dynamic
        ("scale_ub", lambda x, w: w8a8.scaled_fp8_quant(x, None, None, True)),
        ("scale_ub", lambda x, w: w8a8.scaled_fp8_quant(x, 0.5, scale_ub="1200")),
        ("use_per_token_if_dynamic", lambda x, w: w8a8.scaled_fp8_quant(x, use_per_token_if_dynamic=GROUP_SHAPE)),
        # vLLM 0.10: Fp8LinearOp(act_quant_static, cutlass_fp8_supported, act_quant_group_shape, pad_output)
        ("pad_output", lambda x, w: w8a8.Fp8LinearOp(False, True, GROUP_SHAPE)),
        # vLLM 0.11: Fp8LinearOp(act_quant_static, act_quant_group_shape, pad_output)
        ("use_per_token_if_dynamic", lambda x, w: w8a8.Fp8LinearOp(False, GROUP_SHAPE)),
        ("use_per_token_if_dynamic", lambda x, w: w8a8.Fp8LinearOp().apply(x, w, 1.0, use_per_token_if_dynamic="no")),
        ("input_scale_ub", lambda x, w: w8a8.Fp8LinearOp().apply(x, w, 1.0, input_scale_ub=True)),
    ],
)
def test_what_stands_elsewhere_in_other_versions_is_refused(name, call):
    """Taken by its truth, it would silently mean another scale."""
    with pytest.raises(DTypeError, match=f"^{name} needs "):
        call(fresh((4, 128)), fresh_fp8((32, 128)).T)


@pytest.mark.parametrize("wrong", [7.5, 2**31, "7"], ids=repr)
def test_rows_of_padding_are_a_whole_number(wrong):
    with pytest.raises(ShapeError, match=r"^num_token_padding needs a whole number, at most "):
        w8a8.scaled_fp8_quant(fresh((4, 128)), num_token_padding=wrong)


def test_linear_op_needs_the_scale_of_an_input_that_is_fp8():
    w = fp8core.quantize(fresh((8, 32), "float32"))
    with pytest.raises(ScaleError, match="input of float8_e4m3fn needs input_scale, got None"):
        w8a8.Fp8LinearOp().apply(fresh_fp8((4, 32)), w.data.T, w.scale)


def test_a_given_scale_of_an_input_is_one_number_also_where_dynamic_ones_are_per_token():
    w = fp8core.quantize(fresh((8, 32), "float32"))
    with pytest.raises(ShapeError, match="input_scale of input"):
        w8a8.Fp8LinearOp(use_per_token_if_dynamic=True).apply(
            fresh((4, 32)), w.data.T, w.scale, input_scale=fresh_scale((4, 1))
        )


def test_what_is_not_fp8_is_refused_by_its_name():
    x = fresh((4, 32))
    with pytest.raises(DTypeError, match=r"^weight needs an FP8 dtype"):
        w8a8.Fp8LinearOp().apply(x, fresh((8, 32)).T, 1.0)
    with pytest.raises(DTypeError, match=r"^output needs an FP8 dtype"):
        w8a8.scaled_fp8_quant(x, output=np.zeros((4, 32), np.float32))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", None])
def test_a_product_whose_result_would_be_fp8_is_refused(dtype):
    """These functions have no scale of the result."""
    w = fresh_fp8((32, 128)).T
    with pytest.raises(DTypeError, match="out_dtype needs one of float32, float16, bfloat16, "):
        product_of_four_rows(out_dtype=dtype)
    if dtype is not None:
        with pytest.raises(DTypeError, match="out_dtype needs one of float32, float16, bfloat16, "):
            w8a8.Fp8LinearOp().apply(fresh((4, 128)), w, 1.0, out_dtype=dtype)


@pytest.mark.parametrize("number", [1e39, -1e300, 10**60, 10**400], ids=lambda x: str(x)[:4])
def test_a_number_that_is_no_float32_is_refused(number):
    with pytest.raises(ScaleError, match=r"scale needs a number that float32 holds, got -?1(e\+|0)"):
        w8a8.per_tensor_dequantize(fresh_fp8((2, 16)), number)


@pytest.mark.parametrize("wrong", [True, "0.5", 0.5j, None, [0.5]], ids=str)
def test_what_is_no_number_and_no_array_is_refused(wrong):
    with pytest.raises(Fp8Error, match="scale"):
        w8a8.per_tensor_dequantize(fresh_fp8((2, 16)), wrong)


def product_of_four_rows(shape=(4, 32), **operands):
    """Call a product of four rows by vLLM's names."""
    given = {"qinput": fresh_fp8((4, 128)), "weight": fresh_fp8((32, 128)).T, "scale_a": 1.0, "scale_b": 1.0}
    given["out_dtype"] = "float32"
    return w8a8.cutlass_w8a8_scaled_mm(**given | operands, bias=None, output_shape=shape)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@engines("torch-cpu")
def test_one_scale_is_checked_also_where_there_are_no_rows(engine, shape):
    torch = pytest.importorskip("torch")
    scale = torch.from_numpy(np.zeros(64, np.uint8)[1:5].view("float32").reshape(shape))
    codes = {"qinput": engine.array(fresh_fp8((4, 128))), "weight": engine.array(fresh_fp8((32, 128))).T}
    with pytest.raises(LayoutError, match="scale_a needs elements at multiples of 4 bytes"):
        product_of_four_rows((0, 32), **codes, scale_a=scale)


@pytest.mark.parametrize(
    "shape",
    [
        *[(np.int64(-1), 32), np.array([-1, 32]), (-2, -2, 32), (np.int64(5), 32), (4, 31), (np.int32(-4), -1, 32)],
        *[(2.5, 32), (float("nan"), 32), ("4", 32), 128, None, ()],
        *[{4, 32}, {4: 1, 32: 1}, b"\x04 "],
    ],
    ids=str,
)
def test_a_shape_that_the_product_does_not_have_is_refused(shape):
    with pytest.raises(ShapeError, match="output_shape needs "):
        product_of_four_rows(shape)


@pytest.mark.parametrize(
    "shape", [[4, 32], (0, 32), (np.int64(4), 32), np.array([2, 2, 32]), (np.int8(1), 4, 32)], ids=str
)
def test_extents_of_a_shape_may_be_numbers_of_numpy(shape):
    assert product_of_four_rows(shape).shape == tuple(shape)


@pytest.mark.parametrize("name", ["qinput", "weight"])
@pytest.mark.parametrize(
    ("wrong", "error", "got"),
    [
        (None, DTypeError, "an array, got None"),
        ([[1.0]], DTypeError, "an array that offers DLPack, got builtins.list"),
        (1.0, DTypeError, "an array that offers DLPack, got builtins.float"),
        *[(fresh_fp8(shape), ShapeError, f"two axes, got shape {shape}") for shape in [(), (128,), (4, 4, 128)]],
    ],
)
def test_an_operand_that_is_no_matrix_is_refused_by_name(name, wrong, error, got):
    with pytest.raises(error, match=f"^{name} needs {re.escape(got)}$"):
        product_of_four_rows((4, 32), **{name: wrong})
