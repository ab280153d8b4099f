"""What makes no `Fp8Linear` is refused when it is made or assigned."""

import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, Fp8Linear
from ops.layers import SCALE, WEIGHT
from support.engines import fresh, fresh_fp8, fresh_scale

WRONG = {
    "1-D weight": ((WEIGHT[0], 1.0), {}, "weight needs two axes"),
    "3-D weight": ((WEIGHT[None], 1.0), {}, "weight needs two axes"),
    "weight not FP8": ((fresh((8, 256)), 1.0), {}, "weight needs an FP8 dtype"),
    "no scale": ((WEIGHT,), {}, "weight needs weight_scale"),
    "scale of another shape": ((WEIGHT, fresh_scale((7, 1))), {}, "weight_scale for n=8, k=256 needs shape"),
    "scale not fp32": ((WEIGHT, SCALE.astype(np.float16)), {}, "weight_scale needs float32"),
    "bias of another length": ((WEIGHT, SCALE), {"bias": fresh((7,))}, "bias needs 8 contiguous elements"),
    "bias of another dtype": ((WEIGHT, SCALE), {"bias": fresh((8,), "float16"), "out_dtype": "bfloat16"}, "bias needs"),
    "bias that is a number": ((WEIGHT, SCALE), {"bias": 0.5}, "bias needs an array"),
    "bias that is FP8": ((WEIGHT, SCALE), {"bias": fresh_fp8((8,))}, "bias needs"),
    "blocks without groups": ((WEIGHT, fresh_scale((1, 2))), {}, "weight_scale with one scale per 128x128 block needs"),
    "groups without blocks": ((WEIGHT, SCALE), {"group_shape": GROUP_128}, "weight_scale for n=8, k=256 needs shape"),
    "another group": ((WEIGHT, SCALE), {"group_shape": (1, 64)}, "group_shape needs one of"),
    "input scale not fp32": ((WEIGHT, SCALE), {"input_scale": np.ones(1, np.float16)}, "input_scale needs float32"),
    "scale above float32": ((WEIGHT, 1e39), {}, "weight_scale needs a number that float32 holds, got 1e.39"),
    "input scale below float32": ((WEIGHT, SCALE), {"input_scale": 1e-60}, "input_scale needs a number that float32"),
    "dtype of the result": ((WEIGHT, SCALE), {"out_dtype": "uint8"}, "out_dtype needs"),
    "FP8 result": ((WEIGHT, SCALE), {"out_dtype": "float8_e4m3fn"}, "out_dtype needs one of float32"),
    "columns apart": ((np.asfortranarray(WEIGHT), SCALE), {}, "weight needs contiguous rows"),
    "blocks with one input scale": (
        (WEIGHT, fresh_scale((1, 2))),
        {"group_shape": GROUP_128, "input_scale": 0.5},
        "weight_scale with one scale per 128x128 block needs input_scale for groups of 1x128",
    ),
}


def test_a_layer_keeps_its_scale_if_none_is_assigned():
    layer = Fp8Linear(WEIGHT, SCALE)
    with pytest.raises(fp8core.ScaleError, match="weight needs weight_scale"):
        layer.weight_scale = None
    assert layer.weight_scale is SCALE


@pytest.mark.parametrize("wrong", WRONG)
def test_what_makes_no_layer_is_refused_when_it_is_made(wrong):
    arguments, options, words = WRONG[wrong]
    with pytest.raises(fp8core.Fp8Error, match=words):
        Fp8Linear(*arguments, **options)


@pytest.mark.parametrize("weight_group_shape", [PER_TENSOR, PER_TOKEN, BLOCK_128, fp8core.GROUP_128], ids=str)
@pytest.mark.parametrize("group_shape", [PER_TENSOR, PER_TOKEN, GROUP_128], ids=str)
@pytest.mark.parametrize("k", [128, 256])
def test_a_layer_of_one_input_scale_is_made_where_linear_takes_it(weight_group_shape, group_shape, k):
    weight, x = fp8core.quantize(fresh((8, k)), group_shape=weight_group_shape), fresh((3, k))
    try:
        want = fp8core.linear(x, weight, group_shape=group_shape, input_scale=0.5)
    except fp8core.ScaleError:
        with pytest.raises(fp8core.ScaleError):
            Fp8Linear(weight, group_shape=group_shape, input_scale=0.5)
    else:
        layer = Fp8Linear(weight, group_shape=group_shape, input_scale=0.5)
        np.testing.assert_array_equal(layer(x), want)


def test_an_assignment_that_makes_no_layer_is_refused_and_changes_nothing():
    layer, x = Fp8Linear(WEIGHT, SCALE), fresh((3, 256))
    want = layer(x)
    for name, value in (
        ("weight", WEIGHT[:4]),
        ("weight", None),
        ("weight_scale", fresh_scale((3,))),
        ("bias", SCALE),
        ("input_scale", 1e39),
    ):
        with pytest.raises(fp8core.Fp8Error):
            setattr(layer, name, value)
    with pytest.raises(fp8core.ScaleError):
        layer.weight = fp8core.quantize(fresh((8, 256)), group_shape=BLOCK_128)
    assert layer.weight is WEIGHT
    np.testing.assert_array_equal(layer(x), want)
    layer.bias = np.zeros(8, np.float32)  # beside scales that are still those of channels
    np.testing.assert_array_equal(layer(x), want)


WRONG_TO_QUANTIZE = {
    "bias of another length": {"bias": fresh((7,))},
    "bias of another dtype": {"bias": fresh((8,), "float16"), "out_dtype": "bfloat16"},
    "dtype of the result": {"out_dtype": "uint8"},
    "FP8 result": {"out_dtype": "float8_e4m3fn"},
    "dtype of the weight": {"dtype": "float16"},
    "input scale not fp32": {"input_scale": np.ones(1, np.float16)},
    "input scale above float32": {"input_scale": 1e39},
    "input scale of another shape": {"input_scale": np.ones((3, 2), np.float32)},
    "blocks without groups": {"weight_group_shape": BLOCK_128},
    "blocks with one input scale": {
        "weight_group_shape": BLOCK_128,
        "group_shape": GROUP_128,
        "input_scale": 0.5,
    },
    "groups without blocks": {"group_shape": GROUP_128},
    "another group of the weight": {"weight_group_shape": (96, 96)},
    "another group": {"group_shape": (1, 64)},
    "a flag": {"use_fast_accum": "yes"},
}


@pytest.mark.parametrize("wrong", WRONG_TO_QUANTIZE)
def test_from_weight_refuses_before_it_quantizes(wrong, monkeypatch):
    quantized = []
    monkeypatch.setattr("fp8core.ops.layer.quantize_by", lambda *arguments: quantized.append(arguments))
    with pytest.raises(fp8core.Fp8Error):
        Fp8Linear.from_weight(fresh((8, 256)), **WRONG_TO_QUANTIZE[wrong])
    assert quantized == []


@pytest.mark.parametrize("weight", [fresh((256,)), fresh((1, 8, 256)), WEIGHT, fresh((8, 512))[:, ::2]], ids=range(4))
def test_from_weight_refuses_what_is_no_weight(weight):
    with pytest.raises(fp8core.Fp8Error, match=r"^weight needs"):
        Fp8Linear.from_weight(weight)
