"""jax.vmap and scan of calls, and layers as pytrees."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import fp8core  # noqa: E402 - after the skip
import fp8core.jax  # noqa: E402
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, Quantized  # noqa: E402
from fp8core.errors import ScaleError, ShapeError  # noqa: E402
from jax_ffi.cases import CASES, GROUPS, K, N, choices, cpu, ends, near, same, stacked, weight, wide  # noqa: E402, F401
from support.engines import fresh_fp8  # noqa: E402


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vmap_gives_what_calls_of_each_give(case):
    x, *others = case.inputs(5)
    batch = np.stack([x if x.dtype.itemsize == 1 else (x * (i + 1)).astype(x.dtype) for i in range(3)])
    made = jax.jit(jax.vmap(case.function, (0, *[None] * len(others))))(batch, *others)
    wanted = [case.function(x.copy(), *others) for x in batch]
    for i, one in enumerate(wanted):
        assert near(jax.tree.map(lambda x, i=i: x[i], made), one)


@pytest.mark.parametrize(
    ("name", "call", "folded"),
    [
        ("token", lambda x: fp8core.quantize(x).data, True),
        ("group", lambda x: fp8core.quantize(x, group_shape=GROUP_128, scale_layout="mn").scale, True),
        ("static", lambda x: fp8core.quantize(x, scale=0.5).data, True),
        ("tensor", lambda x: fp8core.quantize(x, group_shape=PER_TENSOR).data, False),
        ("block", lambda x: fp8core.quantize(x, group_shape=BLOCK_128).data, False),
        ("linear", lambda x: fp8core.linear(x, weight()), True),
        ("linear by tensor", lambda x: fp8core.linear(x, weight(), group_shape=PER_TENSOR), False),
        ("both", lambda x: fp8core.scaled_mm_nt(fp8core.quantize(x), weight()), True),
        ("norm", lambda x: fp8core.jax.rms_norm_quant(x, x[0], 1e-6, residual=x)[1], False),
    ],
)
def test_a_batch_becomes_rows_where_that_is_exact(name, call, folded):
    x = np.stack([wide(5, K, seed=seed) for seed in range(3)])
    text = str(jax.make_jaxpr(jax.vmap(call, in_axes=1, out_axes=1))(np.moveaxis(x, 0, 1)))
    assert ("scan[" not in text) == folded
    made = jax.vmap(call, in_axes=1, out_axes=1)(np.moveaxis(x, 0, 1))
    for i in range(3):
        assert near(made[:, i] if made.ndim > 2 else made[..., i], jax.jit(call)(x[i]))


def test_one_scale_for_each_of_a_batch_is_not_read_as_scales_of_groups():
    """The numbers of two items of one row are as many as those of two groups of 128, which both rows would share."""
    q, scale = wide(2, 256).astype("float8_e4m3fn"), np.array([1, 2], np.float32)

    def call(q, scale):
        return fp8core.dequantize(q, scale, group_shape=(2, 128))

    wanted = np.stack([call(one, float(number)) for one, number in zip(q, scale, strict=True)])
    assert same(jax.jit(jax.vmap(call))(q, scale), wanted)


@pytest.mark.parametrize(
    ("a", "scale_a", "scale_b", "axes"),
    [
        ((2, 256), (2,), (2, 1), (0, None, None)),
        ((2, 3, 256), (), (2, 1), (0, None, 0)),
        ((2, 3, 256), (), (2,), (0, None, 0)),
    ],
    ids=["groups as rows", "each weight's scale as channels", "each number as channels"],
)
def test_scales_of_a_product_are_not_read_as_others_in_a_batch(a, scale_a, scale_b, axes):
    """Two items of two channels and two groups of k: the batch by itself would be valid, with another meaning."""
    scales = [np.linspace(1, 3, num=int(np.prod(x)), dtype="float32").reshape(x) for x in (scale_a, scale_b)]
    given, w = (fresh_fp8(a), *scales), fresh_fp8((2, 256))

    def call(a, scale_a, scale_b):
        return fp8core.scaled_mm(a, w.T, scale_a, scale_b, out_dtype="float32")

    made = jax.jit(jax.vmap(call, axes))(*given)
    for i in range(2):
        one = [jnp.asarray(x if axis is None else x[i]) for x, axis in zip(given, axes, strict=True)]
        np.testing.assert_allclose(made[i], call(*one), rtol=1e-5, atol=1e-3)


def test_vmap_over_weights():
    stacked = jax.vmap(lambda w: tuple(fp8core.quantize(w)))(np.stack([wide(N, K, seed=seed) for seed in range(3)]))
    x = wide(4, K)

    def each(data, scale, x):
        return fp8core.linear(x, Quantized(data, scale, PER_CHANNEL))

    made = jax.jit(jax.vmap(each, (0, 0, None)))(*stacked, x)
    for i in range(3):
        assert same(made[i], fp8core.linear(x, Quantized(*(np.asarray(part[i]) for part in stacked))))


@pytest.mark.parametrize("mapped", ["a", "offs", "weights", "all"])
def test_vmap_of_a_grouped_product(mapped):
    """Ends count the rows of one item, so that a batch can't become rows."""
    a = [fp8core.quantize(wide(7, K, seed=seed)) for seed in range(2)]
    weights, offs = (stacked(), [part[::-1].copy() for part in stacked()]), (ends(7, 7), np.array([1, 4, 9], np.int32))
    at = {"a": (0, None, None), "weights": (None, 0, None), "offs": (None, None, 0), "all": (0, 0, 0)}[mapped]

    def call(a, weights, offs):
        return fp8core.grouped_scaled_mm_nt(*map(jnp.asarray, (a[0], weights[0], a[1], weights[1])), offs=offs)

    each = [
        tuple(of[0 if axis is None else i] for of, axis in zip((a, weights, offs), at, strict=True)) for i in (0, 1)
    ]
    axes = tuple(None if axis is None else 0 for axis in at)
    given = [
        of[0] if axis is None else jax.tree.map(lambda *parts: np.stack(parts), *map(tuple, of) if i < 2 else of)
        for i, (of, axis) in enumerate(zip((a, weights, offs), at, strict=True))
    ]
    made = jax.jit(jax.vmap(call, axes))(*(tuple(one) if i < 2 else one for i, one in enumerate(given)))
    for i, (x, w, of) in enumerate(each):
        assert same(made[i], fp8core.grouped_scaled_mm_nt(x[0], w[0], x[1], w[1], offs=of))


@pytest.mark.parametrize("mapped", ["x", "ids", "both"])
def test_vmap_of_a_mixture_of_experts(mapped):
    """Places count the rows of one item, so that a batch can't become rows."""
    tokens = [wide(6, 64, seed=seed) for seed in range(2)]
    ids = [choices(6), choices(6)[::-1].copy()]
    axes = 0 if mapped != "ids" else None, 0 if mapped != "x" else None

    def call(x, ids):
        rows, offs, inverse = fp8core.moe_permute(fp8core.quantize(x), ids, GROUPS)
        return *rows, offs, inverse, fp8core.moe_unpermute(x, ids)

    given = [x[0] if axis is None else np.stack(x) for x, axis in zip((tokens, ids), axes, strict=True)]
    made = jax.jit(jax.vmap(call, axes))(*given)
    for i in range(2):
        wanted = call(tokens[i if axes[0] == 0 else 0], ids[i if axes[1] == 0 else 0])
        assert same(tuple(part[i] for part in made), wanted)


def test_layers_go_through_scan():
    layers = [fp8core.jax.Fp8Linear.from_weight(jnp.asarray(wide(K, K, seed=seed) / 16)) for seed in range(3)]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)

    @jax.jit
    def model(x, layers):
        return jax.lax.scan(lambda x, layer: (jnp.tanh(layer(x)), None), x, layers)[0]

    x = jnp.asarray(wide(4, K))
    wanted = x
    for layer in layers:
        wanted = jax.jit(lambda x, layer: jnp.tanh(layer(x)))(wanted, layer)
    assert near(model(x, stacked), wanted)


def test_a_layer_is_frozen_but_for_its_bias():
    layer = fp8core.jax.Fp8Linear.from_weight(
        jnp.asarray(wide(N, K)), bias=jnp.zeros(N), input_scale=0.02, group_shape=PER_TENSOR
    )
    x = jnp.asarray(wide(4, K, dtype=np.float32))
    of_layer, of_x = jax.grad(lambda layer, x: layer(x).sum(), (0, 1))(layer, x)
    assert not np.asarray(of_layer.weight, np.float32).any()
    assert not of_layer.weight_scale.any()
    assert not of_layer.input_scale.any()
    assert np.asarray(of_layer.bias).tolist() == [4.0] * N
    assert of_x.shape == x.shape


def test_a_layer_refuses_a_scale_that_float32_does_not_hold():
    with pytest.raises(ScaleError, match=r"input_scale needs a number that float32 holds, got 1e\+39"):
        fp8core.jax.Fp8Linear.from_weight(jnp.asarray(wide(N, K)), input_scale=1e39)


def test_a_subclass_of_quantized_keeps_its_group_shape_once_it_is_a_pytree_of_its_own():
    class Own(fp8core.Quantized):
        pass

    q = fp8core.quantize(jnp.ones((4, 256)), group_shape=(1, 128))
    pair = Own(*q, q.group_shape)
    assert jax.tree.map(lambda x: x, q).group_shape == q.group_shape
    assert jax.tree.map(lambda x: x, pair).group_shape is None
    jax.tree_util.register_pytree_node(Own, lambda p: (tuple(p), p.group_shape), lambda group, xs: Own(*xs, group))
    assert jax.tree.map(lambda x: x, pair).group_shape == q.group_shape
    assert (jax.jit(fp8core.dequantize)(pair) == 1).all()


@pytest.mark.parametrize("groups", [(PER_CHANNEL, PER_TOKEN), (PER_TENSOR, PER_TENSOR), (BLOCK_128, GROUP_128)])
def test_a_layer_is_a_pytree_that_calls_linear(groups):
    of_weight, of_x = groups
    w, x, bias = wide(N, K), wide(5, K), wide(N, dtype=np.float32)

    @jax.jit
    def made(w, bias):
        return fp8core.jax.Fp8Linear.from_weight(w, bias=bias, weight_group_shape=of_weight, group_shape=of_x)

    layer = made(w, bias)
    wanted = fp8core.Fp8Linear.from_weight(w, bias=bias, weight_group_shape=of_weight, group_shape=of_x)
    assert same((layer.weight, layer.weight_scale), (wanted.weight, wanted.weight_scale))
    assert same(jax.jit(lambda layer, x: layer(x))(layer, x), wanted(x))
    assert same(layer(jnp.asarray(x)), wanted(x))
    q = fp8core.quantize(x, group_shape=of_x)
    assert same(layer(jax.tree.map(jnp.asarray, q)), wanted(q))
    leaves, structure = jax.tree.flatten(layer)
    assert len(leaves) == 3
    assert jax.tree.unflatten(structure, leaves).group_shape == of_x


def test_a_layer_needs_groups_that_products_have():
    with pytest.raises(ScaleError, match="weight_group_shape"):
        fp8core.jax.Fp8Linear.from_weight(jnp.ones((4, 32)), weight_group_shape=(2, 2))


@pytest.mark.parametrize(
    "pair", [list, tuple, lambda sides: tuple(map(np.int64, sides))], ids=["list", "tuple", "numpy"]
)
def test_a_layer_takes_group_shapes_as_functions_do(pair):
    w, x = weight(BLOCK_128), jnp.asarray(wide(5, K))
    layer = fp8core.jax.Fp8Linear(*w, weight_group_shape=pair(BLOCK_128), group_shape=pair(GROUP_128))
    named = fp8core.jax.Fp8Linear(*w, weight_group_shape=BLOCK_128, group_shape=GROUP_128)
    assert jax.tree.structure(layer) == jax.tree.structure(named)
    assert hash(jax.tree.structure(layer)) == hash(jax.tree.structure(named))
    wanted = fp8core.linear(x, w, group_shape=GROUP_128)
    assert same(layer(x), wanted)
    assert same(jax.jit(lambda layer, x: layer(x))(layer, x), wanted)


@pytest.mark.parametrize("name", ["weight_group_shape", "group_shape"])
@pytest.mark.parametrize("shape", [128, None, {}, [1, "128"], [[1], 128], np.array([1, 128])], ids=repr)
def test_a_layer_refuses_what_is_no_group_shape(name, shape):
    with pytest.raises(ShapeError, match=f"^{name} needs a pair of whole numbers, each -1 or 1 to 2"):
        fp8core.jax.Fp8Linear(*weight(), **{name: shape})
