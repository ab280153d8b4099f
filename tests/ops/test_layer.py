"""`Fp8Linear`: checked when it is made, true to its arrays at every call, copied and saved like any object."""

import copy
import io
import pickle
import sys
import threading
import weakref
from contextlib import contextmanager

import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, Fp8Linear
from fp8core.ops import layer as layer_module
from support.engines import NumpyEngine, engines, fresh, fresh_fp8, fresh_scale
from support.host_arrays import Exporter

HOSTS = engines("numpy", "torch-cpu", "jax-cpu", "cupy", "torch-cuda")
TORCHES = engines("torch-cpu", "torch-cuda")
SCHEMES = {
    "channel": {},
    "tensor": {"weight_group_shape": PER_TENSOR, "group_shape": PER_TENSOR},
    "block": {"weight_group_shape": BLOCK_128, "group_shape": GROUP_128},
}


def bits(engine, x):
    return np.ascontiguousarray(engine.numpy(x)).view(np.uint16)


def made(engine, seed, n=48, k=256, **options):
    weight = engine.array(fresh((n, k), spread=1.0 + seed / 8))
    return Fp8Linear.from_weight(weight, **options)


def product(layer, x):
    """Return what a layer has to give, by functions that keep nothing."""
    return fp8core.linear(
        x,
        layer.weight,
        layer.weight_scale,
        bias=layer.bias,
        input_scale=layer.input_scale,
        group_shape=layer.group_shape,
    )


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


WEIGHT, SCALE = fresh_fp8((8, 256)), fresh_scale((8, 1))
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


def test_scales_of_tokens_may_be_a_vector():
    x, scale = fresh_fp8((4, 256)), fresh_scale((4,))
    of_vector, of_column = (Fp8Linear(WEIGHT, SCALE, input_scale=one) for one in (scale, scale[:, None]))
    np.testing.assert_array_equal(of_vector(x), of_column(x))


def test_a_pickle_without_added_attributes_is_read():
    layer, state = Fp8Linear(WEIGHT, SCALE), Fp8Linear(WEIGHT, SCALE).__getstate__()
    del state["added"]
    layer.__setstate__(state)
    assert layer.weight_scale.shape == SCALE.shape


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


@contextmanager
def at_each_line_of_a_layer(do):
    """Call ``do`` before each line of the layer's module that this thread comes to; nothing is traced within."""

    def trace(frame, event, _):
        if frame.f_code.co_filename != layer_module.__file__:
            return None
        if event == "line":
            do()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_a_call_of_another_thread_amid_an_assignment_is_one_of_the_layer_before_or_after():
    """Here at each line of it: groups, arrays and history change together."""
    x = fresh((3, 256))
    weights = [fp8core.quantize(fresh((256, 256)), group_shape=group) for group in (GROUP_128, BLOCK_128)]
    wants = [Fp8Linear(weight, group_shape=GROUP_128)(x) for weight in weights]
    layer, seen = Fp8Linear(weights[0], group_shape=GROUP_128), []
    with at_each_line_of_a_layer(lambda: seen.append(layer(x))):
        layer.weight = weights[1]
    seen.append(layer(x))
    which = [next(i for i, want in enumerate(wants) if np.array_equal(y, want)) for y in seen]
    assert which == sorted(which)
    assert which[0] == 0
    assert which[-1] == 1


def test_threads_that_assign_two_arrays_of_a_layer_lose_none():
    """Here at each line of one assignment in turn: the other one must be kept, before it or after it."""
    weights = [fp8core.quantize(fresh((8, 256))) for _ in range(2)]
    bias, lines = np.ones(8, np.float32), 1
    while True:
        layer, left = Fp8Linear(weights[0], bias=np.zeros(8, np.float32)), lines
        other = threading.Thread(target=setattr, args=(layer, "bias", bias))

        def amid(other=other):
            nonlocal left
            left -= 1
            if not left:
                other.start()
                other.join(0.1)  # or until the assignment has ended, if it waits for that

        with at_each_line_of_a_layer(amid):
            layer.weight = weights[1]
        if left > 0:  # the assignment has no more lines
            break
        other.join()
        assert layer.weight is weights[1].data
        assert layer.weight_scale is weights[1].scale
        assert layer.bias is bias
        lines += 1
    assert lines > 3


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
