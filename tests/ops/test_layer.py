"""`Fp8Linear`: true to its arrays at every call, also to those that were assigned or written since."""

import pickle

import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, Fp8Linear
from ops.layers import HOSTS, SCALE, SCHEMES, TORCHES, WEIGHT, bits, made, product
from support.engines import NumpyEngine, fresh, fresh_fp8, fresh_scale
from support.host_arrays import Exporter


@HOSTS
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("calls", [0, 1, 4])
def test_an_assigned_weight_is_the_one_that_is_used(engine, scheme, calls):
    x, layer, other = (
        engine.array(fresh((3, 256))),
        made(engine, 0, **SCHEMES[scheme]),
        made(engine, 5, **SCHEMES[scheme]),
    )
    before = bits(engine, layer(x))
    for _ in range(calls):
        layer(x)
    want = bits(engine, other(x))
    assert (want != before).any()
    layer.weight, layer.weight_scale = other.weight, other.weight_scale
    for _ in range(3):
        np.testing.assert_array_equal(bits(engine, layer(x)), want)
    layer.weight = fp8core.quantize(
        engine.array(fresh((48, 256), spread=1.0)), group_shape=SCHEMES[scheme].get("weight_group_shape", PER_TOKEN)
    )
    np.testing.assert_array_equal(bits(engine, layer(x)), before)


@TORCHES
@pytest.mark.parametrize("calls", [0, 1, 2, 4])
@pytest.mark.parametrize("array", ["weight", "weight_scale", "bias", "input_scale"])
def test_memory_exchanged_under_an_array_is_followed(engine, array, calls):
    torch = engine.torch
    x, bias = engine.array(fresh((3, 256))), engine.array(fresh((48,)))
    layer = made(engine, 0, bias=bias, input_scale=engine.array(np.array([0.02], np.float32)))
    for _ in range(calls):
        layer(x)
    tensor = getattr(layer, array)
    changed = tensor.to(torch.float32) * (1.5 if array != "weight" else -1)
    tensor.data = changed.to(tensor.dtype)
    for _ in range(3):
        np.testing.assert_array_equal(bits(engine, layer(x)), bits(engine, product(layer, x)))
    tensor.data = tensor.data.to("cpu").clone().to(engine.device)  # offloaded, and back elsewhere
    for _ in range(3):
        np.testing.assert_array_equal(bits(engine, layer(x)), bits(engine, product(layer, x)))


@TORCHES
@pytest.mark.parametrize("how", ["copy_", "quantize", "requantize", "slice"])
def test_a_weight_written_in_place_is_the_one_that_is_used(engine, how):
    layer, x = made(engine, 0), engine.array(fresh((3, 256)))
    for turn in range(4):
        layer(x)
        new = engine.array(fresh((48, 256), spread=2 + turn))
        q = fp8core.quantize(new)
        if how == "copy_":
            layer.weight.copy_(q.data)
            layer.weight_scale.copy_(q.scale)
        elif how == "quantize":
            fp8core.quantize(new, out=(layer.weight, layer.weight_scale))
        elif how == "slice":
            fp8core.quantize(new[16:32], out=(layer.weight[16:32], layer.weight_scale[16:32]))
        else:
            scales = engine.array(fresh_scale((3,), salt=turn))
            fp8core.requantize_with_max_scale(layer.weight, scales, [16, 16, 16])
        want = bits(engine, product(Fp8Linear(layer.weight.clone(), layer.weight_scale.clone()), x))
        np.testing.assert_array_equal(bits(engine, layer(x)), want)


def test_options_are_read_and_not_assigned():
    """An assigned option was kept as an attribute, and the layer went on without it."""
    options = {"activation": "gelu", "out_dtype": "float16", "use_fast_accum": False, "batch_invariant": True}
    layer = Fp8Linear(*fp8core.quantize(fresh((48, 256))), **options)
    for name, value in options.items():
        assert getattr(layer, name) == value
        with pytest.raises(AttributeError, match=f"'{name}' of 'Fp8Linear' object has no setter"):
            setattr(layer, name, value)
    assert all(getattr(pickle.loads(pickle.dumps(layer)), name) == value for name, value in options.items())
    plain = Fp8Linear(layer.weight, layer.weight_scale)
    assert [getattr(plain, name) for name in options] == [None, None, True, False]


@HOSTS
@pytest.mark.parametrize("group", [PER_TENSOR, PER_TOKEN, GROUP_128], ids=str)
def test_a_quantized_input_is_taken_as_it_is(engine, group):
    x = engine.array(fresh((2, 3, 256)))
    layer = made(engine, 0, weight_group_shape=BLOCK_128 if group == GROUP_128 else PER_TOKEN, group_shape=group)
    q = fp8core.quantize(x, group_shape=group)
    want = bits(engine, fp8core.scaled_mm_nt(q, fp8core.Quantized(layer.weight, layer.weight_scale)))
    for _ in range(3):
        np.testing.assert_array_equal(bits(engine, layer(q)), want)
        np.testing.assert_array_equal(bits(engine, fp8core.linear(q, layer.weight, layer.weight_scale)), want)
    if group == PER_TENSOR:
        layer.input_scale = q.scale
        np.testing.assert_array_equal(bits(engine, layer(q.data)), want)


class Pair(fp8core.Quantized):
    """A pair of a user's class."""


def test_a_quantized_input_may_be_of_a_subclass():
    layer, q = made(NumpyEngine(), 0), fp8core.quantize(fresh((3, 256)))
    np.testing.assert_array_equal(layer(Pair(*q, q.group_shape)), layer(q))


def test_attributes_and_repr_describe_the_layer():
    layer = Fp8Linear.from_weight(
        fresh((48, 256)), bias=fresh((48,)), weight_group_shape=BLOCK_128, group_shape=GROUP_128
    )
    assert (layer.in_features, layer.out_features) == (256, 48)
    assert layer.group_shape == GROUP_128
    assert layer.bias.shape == (48,)
    assert repr(layer) == (
        "Fp8Linear(in_features=256, out_features=48, bias=True, weight=float8_e4m3fn, weight_scale=(1, 2), "
        "x by groups of 1x128)"
    )


def test_arrays_may_offer_dlpack_alone():
    """As an engine's do: they have no shape and no dtype of their own."""
    weight, x, out = fp8core.quantize(fresh((48, 256))), fresh((3, 256), "float32"), np.empty((3, 48), np.float32)
    of_numpy = Fp8Linear(*weight, bias=fresh((48,), "float32"), input_scale=0.02)
    arrays = [Exporter(weight.data.view(np.uint8), "float8_e4m3fn")]
    arrays += [Exporter(one, "float32") for one in (weight.scale, of_numpy.bias, of_numpy.input_scale)]
    layer = Fp8Linear(*arrays[:2], bias=arrays[2], input_scale=arrays[3])
    layer(Exporter(x, "float32"), out=Exporter(out, "float32"))
    np.testing.assert_array_equal(out, of_numpy(x))
    layer.weight_scale = arrays[1]
    assert repr(layer) == repr(of_numpy)
    assert (layer.in_features, layer.out_features) == (256, 48)


def test_scales_of_tokens_may_be_a_vector():
    x, scale = fresh_fp8((4, 256)), fresh_scale((4,))
    of_vector, of_column = (Fp8Linear(WEIGHT, SCALE, input_scale=one) for one in (scale, scale[:, None]))
    np.testing.assert_array_equal(of_vector(x), of_column(x))


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_every_format_makes_a_layer_that_runs(dtype):
    x, w = fresh((3, 256), "float32", spread=1), fresh((8, 256), "float32", spread=1)
    layer = Fp8Linear.from_weight(w, dtype=dtype)
    want = x.astype(np.float64) @ fp8core.dequantize(layer.weight, layer.weight_scale).astype(np.float64).T
    assert np.linalg.norm(layer(x) - want) <= 0.05 * np.linalg.norm(want)


def test_numbers_become_arrays_once():
    layer = Fp8Linear(WEIGHT, 0.5, input_scale=0.25)
    assert layer.weight_scale.dtype == layer.input_scale.dtype == np.float32
    x = fresh((3, 256))
    np.testing.assert_array_equal(layer(x), fp8core.linear(x, WEIGHT, 0.5, input_scale=0.25))
