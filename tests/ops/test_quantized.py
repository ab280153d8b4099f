"""`Quantized`: a pair that knows its groups, whatever is done to it."""

import copy
import pickle

import numpy as np
import pytest

import fp8core
from fp8core import GROUP_128, PER_TENSOR, Quantized
from support.engines import fresh

X = fresh((4, 256), "float32")


@pytest.mark.parametrize(
    "made",
    [copy.copy, copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q)), lambda q: q._replace(scale=q.scale.copy())],
    ids=["copy", "deepcopy", "pickle", "_replace"],
)
def test_a_copy_has_the_same_groups(made):
    q = fp8core.quantize(X, group_shape=GROUP_128)
    other = made(q)
    assert type(other) is Quantized
    assert other.group_shape == GROUP_128
    np.testing.assert_array_equal(other.dequantize(), q.dequantize())


def test_a_pair_that_is_made_of_its_fields_has_no_known_groups():
    q = fp8core.quantize(X, group_shape=GROUP_128)
    other = Quantized._make(tuple(q))
    assert other.group_shape is None
    with pytest.raises(fp8core.ScaleError, match="group_shape"):
        other.dequantize()


def test_a_number_is_the_scale_of_the_transpose_too():
    codes = fp8core.quantize(X, scale=0.5).data
    turned = Quantized(codes, 0.5, PER_TENSOR).T
    assert turned.scale == 0.5
    assert turned.group_shape == PER_TENSOR
    a = fp8core.quantize(X)
    want = fp8core.scaled_mm_nt(a, Quantized(codes, np.float32([0.5]), PER_TENSOR))
    np.testing.assert_array_equal(fp8core.scaled_mm(a, turned), want)
