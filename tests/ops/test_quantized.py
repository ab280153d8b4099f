"""`Quantized`: a pair that knows its groups, whatever is done to it."""

import copy
import pickle

import numpy as np
import pytest

import fp8core
from fp8core import GROUP_128, PER_TENSOR, Quantized
from support.engines import engines, fresh

X = fresh((4, 256), "float32")


def pickled(protocol):
    return lambda q: pickle.loads(pickle.dumps(q, protocol))


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {protocol}": pickled(protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)},
}


class Named(Quantized):
    """A pair of a user's class, which gets an attribute of its own."""


@engines("numpy", "torch-cpu", "jax-cpu", "cupy", "torch-cuda")
@pytest.mark.parametrize("made", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0_bytes"])
def test_a_copy_has_the_same_groups(engine, made, scale_format):
    q = fp8core.quantize(engine.array(X), group_shape=GROUP_128, scale_format=scale_format)
    other = made(q)
    assert type(other) is Quantized
    assert other.group_shape == GROUP_128
    assert (other.data is q.data) == (other.scale is q.scale) == (made is copy.copy)
    np.testing.assert_array_equal(engine.numpy(other.dequantize()), engine.numpy(q.dequantize()))


@pytest.mark.parametrize("replace", [Quantized._replace, Quantized.__replace__], ids=["_replace", "copy.replace"])
def test_replacing_a_part_keeps_the_groups(replace):
    q = fp8core.quantize(X, group_shape=GROUP_128)
    other = replace(q, scale=q.scale.copy())
    assert (type(other), other.group_shape) == (Quantized, GROUP_128)
    np.testing.assert_array_equal(other.dequantize(), q.dequantize())


@pytest.mark.parametrize("made", COPIES.values(), ids=COPIES)
def test_a_copy_keeps_its_class_and_added_attributes(made):
    q = Named(*fp8core.quantize(X, group_shape=GROUP_128), GROUP_128)
    q.name = "q_proj"
    other = made(q)
    assert (type(other), other.name, other.group_shape) == (Named, "q_proj", GROUP_128)


@pytest.mark.parametrize("made", COPIES.values(), ids=COPIES)
def test_an_added_attribute_may_refer_to_the_pair(made):
    q = Named(*fp8core.quantize(X, group_shape=GROUP_128), GROUP_128)
    q.pairs, q.name = [q], "q_proj"
    other = made(q)
    assert other.pairs[0] is (q if made is copy.copy else other)
    assert (other.name, other.group_shape) == ("q_proj", GROUP_128)


@engines("torch-cpu", "torch-cuda")
@pytest.mark.parametrize("made", COPIES.values(), ids=COPIES)
def test_an_added_attribute_may_be_a_tensor_of_codes(engine, made):
    q = fp8core.quantize(engine.array(X), group_shape=GROUP_128)
    q.first = q.data
    other = made(q)
    assert other.first is other.data


@engines("numpy", "cupy")
@pytest.mark.parametrize("made", COPIES.values(), ids=COPIES)
def test_an_array_that_is_also_held_by_others_stays_one(engine, made):
    q = fp8core.quantize(engine.array(X), group_shape=GROUP_128)
    other, held = made((q, q.data))
    assert other.data is held


@engines("numpy", "torch-cpu", "cupy", "torch-cuda")
@pytest.mark.parametrize("made", [copy.deepcopy, pickled(pickle.HIGHEST_PROTOCOL)], ids=["deepcopy", "pickle"])
def test_what_pairs_share_is_shared_among_the_copies(engine, made):
    q = fp8core.quantize(engine.array(X), group_shape=GROUP_128)
    one, other = made([q, Quantized(*q)])
    assert one.data is other.data is not q.data
    assert one.scale is other.scale is not q.scale


@pytest.mark.parametrize(
    "parts",
    [
        ("codes", 0.5),
        (None, None),
        (fp8core.ArraySpec((4, 256), "float8_e4m3fn"), fp8core.ArraySpec((4, 1), "float32")),
    ],
    ids=["text", "None", "specs"],
)
@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickled(2)], ids=["copy", "deepcopy", "pickle 2"])
def test_a_pair_of_anything_can_be_copied(parts, made):
    assert repr(made(Quantized(*parts))) == repr(Quantized(*parts))


def test_a_pair_that_is_made_of_its_fields_has_no_known_groups():
    q = fp8core.quantize(X, group_shape=GROUP_128)
    other = Quantized._make(tuple(q))
    assert other.group_shape is None
    with pytest.raises(fp8core.ScaleError, match="group_shape"):
        other.dequantize()


@engines("numpy", "torch-cpu", "jax-cpu", "cupy", "torch-cuda")
@pytest.mark.parametrize("shape", [(1,), (4,)], ids=["tensor", "rows"])
def test_scales_of_one_axis_are_those_of_the_transpose(engine, shape):
    """torch is going to refuse the transpose of anything but a matrix, and warns of it."""
    data = fp8core.quantize(engine.array(X)).data
    pair = Quantized(data, engine.array(np.ones(shape, np.float32)))
    assert pair.T.scale is pair.scale
    assert pair.T.shape == (256, 4)


def test_a_number_is_the_scale_of_the_transpose_too():
    codes = fp8core.quantize(X, scale=0.5).data
    turned = Quantized(codes, 0.5, PER_TENSOR).T
    assert turned.scale == 0.5
    assert turned.group_shape == PER_TENSOR
    a = fp8core.quantize(X)
    want = fp8core.scaled_mm_nt(a, Quantized(codes, np.float32([0.5]), PER_TENSOR))
    np.testing.assert_array_equal(fp8core.scaled_mm(a, turned), want)


@pytest.mark.parametrize("shape", [(256,), (2, 4, 256)], ids=str)
def test_only_matrices_are_turned(shape):
    with pytest.raises(fp8core.ShapeError, match="T needs data of two axes, got shape"):
        _ = fp8core.quantize(fresh(shape), group_shape=GROUP_128).T
