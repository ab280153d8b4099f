"""Copies of `Fp8Linear`, shallow and deep, and layers that were saved."""

import copy
import io
import pickle
import weakref

import numpy as np
import pytest

import fp8core
from fp8core import Fp8Linear
from ops.layers import HOSTS, SCALE, TORCHES, WEIGHT, bits, made, product
from support.engines import engines, fresh


@HOSTS
@pytest.mark.parametrize("calls", [0, 3])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_a_layer_of_its_own(engine, calls, how):
    layer, x = made(engine, 0, bias=engine.array(fresh((48,)))), engine.array(fresh((3, 256)))
    want = bits(engine, layer(x))
    for _ in range(calls):
        layer(x)
    twin = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    assert twin.weight is not layer.weight
    twin.weight_scale = engine.array(engine.numpy(layer.weight_scale) * np.float32(2))
    for _ in range(3):
        np.testing.assert_array_equal(bits(engine, layer(x)), want)
        np.testing.assert_array_equal(bits(engine, twin(x)), bits(engine, product(twin, x)))
    assert repr(twin) == repr(layer)


@engines("numpy", "torch-cpu", "cupy", "torch-cuda")
@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_layers_of_one_weight_are_copied_with_one(engine, again):
    """Else codes and scale that are written in place would be new codes in one copy, and a new scale in both."""
    layer, x = made(engine, 0), engine.array(fresh((3, 256)))
    twins = again([layer, Fp8Linear(layer.weight, layer.weight_scale)])
    assert twins[0].weight is twins[1].weight is not layer.weight
    fp8core.quantize(engine.array(fresh((48, 256), spread=3.0)), out=(twins[0].weight, twins[0].weight_scale))
    for one in twins:
        np.testing.assert_array_equal(bits(engine, one(x)), bits(engine, product(twins[0], x)))


@engines("numpy", "torch-cpu", "torch-cuda")
def test_pickles_keep_no_weight(engine):
    layer = made(engine, 0)
    gone = weakref.ref(layer.weight)
    assert pickle.loads(pickle.dumps(layer)).weight.shape == (48, 256)
    del layer
    assert gone() is None


@HOSTS
def test_a_shallow_copy_has_the_same_arrays(engine):
    layer, x = made(engine, 0), engine.array(fresh((3, 256)))
    twin = copy.copy(layer)
    assert twin.weight is layer.weight
    twin.weight_scale = engine.array(engine.numpy(layer.weight_scale) * np.float32(2))
    for one in (layer, twin):
        np.testing.assert_array_equal(bits(engine, one(x)), bits(engine, product(one, x)))


class Named(Fp8Linear):
    """A layer of a user's class, with an attribute of its own."""

    def __init__(self, *arrays, name):
        super().__init__(*arrays)
        self.name = name


class Slotted(Named):
    """The same with a slot."""

    __slots__ = ("name", "unset")


COPIES = pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "deepcopy", "pickle"]
)


@COPIES
@pytest.mark.parametrize("kind", [Named, Slotted])
def test_copies_keep_added_attributes(kind, again):
    codes, scale = fp8core.quantize(fresh((48, 256)))
    layer = kind(codes, scale, name="q_proj")
    layer.seen = [layer]
    twin = again(layer)
    assert (type(twin), twin.name) == (kind, "q_proj")
    assert (twin.seen is layer.seen) == (again is copy.copy)
    assert again is copy.copy or twin.seen == [twin]


@COPIES
@engines("numpy", "torch-cpu", "cupy", "torch-cuda")
def test_an_added_attribute_may_be_the_weight(engine, again):
    layer = made(engine, 0)
    layer.first = layer.weight
    twin = again(layer)
    assert twin.first is twin.weight
    assert (twin.weight is layer.weight) == (again is copy.copy)


@TORCHES
@pytest.mark.parametrize("calls", [0, 3])
def test_torch_saves_a_layer(engine, calls):
    layer, x = made(engine, 0), engine.array(fresh((3, 256)))
    want = bits(engine, layer(x))
    for _ in range(calls):
        layer(x)
    file = io.BytesIO()
    engine.torch.save(layer, file)
    file.seek(0)
    back = engine.torch.load(file, weights_only=False)
    np.testing.assert_array_equal(bits(engine, back(x)), want)


def test_a_pickle_without_added_attributes_is_read():
    layer, state = Fp8Linear(WEIGHT, SCALE), Fp8Linear(WEIGHT, SCALE).__getstate__()
    del state["added"]
    layer.__setstate__(state)
    assert layer.weight_scale.shape == SCALE.shape
