"""jax.vmap, scan and gradients of calls, and layers as pytrees."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import fp8core  # noqa: E402 - after the skip
import fp8core.jax  # noqa: E402
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, Quantized  # noqa: E402
from fp8core.errors import ScaleError, ShapeError, UnsupportedProblemError  # noqa: E402
from jax_ffi.cases import CASES, GROUPS, K, N, choices, cpu, ends, near, same, stacked, weight, wide  # noqa: E402, F401
from support.engines import fresh, fresh_fp8, fresh_scale  # noqa: E402


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


@pytest.mark.parametrize("groups", [(PER_CHANNEL, PER_TOKEN), (PER_TENSOR, PER_TENSOR), (BLOCK_128, GROUP_128)])
def test_the_gradient_of_linear_is_that_of_the_dequantized_weight(groups):
    of_weight, of_x = groups
    w = weight(of_weight)
    x, bias = wide(2, 5, K, dtype=np.float32), wide(N, dtype=np.float32)

    def loss(x, bias):
        y = fp8core.linear(x, Quantized(w.data, w.scale, of_weight), bias=bias, group_shape=of_x)
        return (y**2).sum() / 2

    y = fp8core.linear(x, w, bias=bias, group_shape=of_x)
    wanted = y @ w.dequantize(), y.sum((0, 1))
    for function in (loss, jax.jit(loss), jax.checkpoint(loss)):
        for made, one in zip(jax.grad(function, (0, 1))(x, bias), wanted, strict=True):
            np.testing.assert_allclose(made, one, rtol=1e-4, atol=1e-4 * np.abs(one).max())
    for at, one in enumerate(wanted):
        np.testing.assert_allclose(jax.grad(loss, at)(x, bias), one, rtol=1e-4, atol=1e-4 * np.abs(one).max())
    forward = jax.jvp(loss, (x, bias), (x, bias))[1]
    np.testing.assert_allclose(forward, (wanted[0] * x).sum() + (wanted[1] * bias).sum(), rtol=1e-4)
    batched = jax.vmap(jax.grad(loss), (0, None))(x, bias)
    np.testing.assert_allclose(batched[1], jax.grad(loss)(x[1:], bias)[0], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    "axes", [(1, None, None), (None, 0, 0), (1, 0, 0), (None, 1, 0), (0, None, 0), (1, 0, None)], ids=str
)
def test_the_derivatives_of_a_batch_are_those_of_each(axes):
    x, each = [wide(3, K, dtype=np.float32, seed=seed) for seed in range(2)], [weight(n=8), weight(n=8)]
    each[1] = fp8core.quantize(wide(8, K, seed=5))
    parts = x, [w.data for w in each], [w.scale for w in each]
    layer = lambda x, data, scale: fp8core.linear(x, Quantized(data, scale, PER_CHANNEL))  # noqa: E731
    grad = jax.grad(lambda *given: (layer(*given) ** 2).sum())
    given = [jnp.asarray(of[0] if at is None else np.stack(of, at)) for of, at in zip(parts, axes, strict=True)]
    for call in (grad, lambda x, *w: jax.jvp(lambda x: layer(x, *w), (x,), (x + 1,))[1]):
        made = jax.vmap(call, axes)(*given)
        for i in range(2):
            one = call(*(jnp.asarray(of[0 if at is None else i]) for of, at in zip(parts, axes, strict=True)))
            np.testing.assert_allclose(made[i], one, rtol=1e-4, atol=1e-2)


FORWARD = {
    "jvp": lambda f, x, t: jax.jvp(f, (x,), (t,))[1],
    "jacfwd": lambda f, x, t: jnp.einsum("mnik,ik->mn", jax.jacfwd(f)(x), t),
    "linearize": lambda f, x, t: jax.linearize(f, x)[1](t),
    "vmap": lambda f, x, t: jax.vmap(lambda t: jax.jvp(f, (x,), (t,))[1])(t[None])[0],
    "scan": lambda f, x, t: jax.lax.scan(lambda _, t: (None, jax.jvp(f, (x,), (t,))[1]), None, t[None])[1][0],
}


@pytest.mark.parametrize("way", FORWARD)
@pytest.mark.parametrize("groups", [(PER_CHANNEL, PER_TOKEN), (BLOCK_128, GROUP_128)])
def test_derivatives_alone_in_a_program(way, groups):
    """Where the product itself is not asked for, the program has nothing but its derivative."""
    w = jax.tree.map(jnp.asarray, weight(groups[0]))
    x, tangent = (jnp.asarray(wide(3, K, dtype=np.float32, seed=seed)) for seed in (0, 1))
    made = jax.jit(lambda x, t, w: FORWARD[way](lambda x: fp8core.linear(x, w, group_shape=groups[1]), x, t))
    np.testing.assert_allclose(made(x, tangent, w), tangent @ w.dequantize().T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("out_dtype", [None, "float32", "float16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_derivatives_have_the_dtypes_of_what_they_are_of(dtype, out_dtype):
    x, bias, w = jnp.asarray(wide(3, K), dtype), jnp.asarray(wide(N), "float32"), jax.tree.map(jnp.asarray, weight())

    def call(x, bias):
        return fp8core.linear(x, w, bias=bias, out_dtype=out_dtype)

    for wrapped in (lambda f: f, jax.jit):
        tangent = wrapped(lambda *given: jax.jvp(call, given, given)[1])(x, bias)
        back = wrapped(lambda *given: jax.vjp(call, *given)[1](call(*given)))(x, bias)
        y = call(x, bias)
        wide_x, wide_y, wide_w = (one.astype(jnp.float32) for one in (x, y, w.dequantize()))
        wanted = wide_x @ wide_w.T + bias, wide_y @ wide_w, wide_y.sum(0)
        assert [one.dtype for one in (tangent, *back)] == [y.dtype, x.dtype, bias.dtype]
        for made, one in zip((tangent, *back), wanted, strict=True):
            np.testing.assert_allclose(made, one, rtol=2**-7, atol=2**-7 * np.abs(one).max())


def test_derivatives_in_a_part_of_a_mesh_and_outside():
    """Only inside do dequantizations need no devices while they are lowered."""
    w, x = jax.tree.map(jnp.asarray, weight()), jnp.asarray(wide(3, K, dtype=np.float32))
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), ("rows", "other"))
    spec = jax.sharding.PartitionSpec("rows")

    def tangent(x):
        return jax.jvp(lambda x: fp8core.linear(x, w), (x,), (x,))[1]

    inside = jax.shard_map(tangent, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"rows"})
    assert near(jax.jit(inside)(x), jax.jit(tangent)(x))


@pytest.mark.parametrize(
    ("n", "k", "shape"),
    [
        (256, 128, (2, 1)),
        (256, 100, (2, 1)),
        (256, 128, (1, 2)),
        (128, 256, (2, 1)),
        (128, 256, (1, 2)),
        (256, 256, (2, 2)),
        (200, 300, (2, 3)),
        (64, 256, (64, 2)),
        (64, 300, (64, 3)),
        (64, 100, (64, 1)),
        (64, 256, (64,)),
    ],
    ids=str,
)
def test_the_gradient_reads_a_scale_as_the_product_does(n, k, shape):
    """Of blocks there may be one along an axis, and those along the other stand or lie."""
    weight, scale, x = fresh_fp8((n, k)), fresh_scale(shape), fresh((3, k), "float32")
    group = BLOCK_128 if n not in shape else PER_CHANNEL if shape in ((n,), (n, 1)) else GROUP_128
    options = {"group_shape": PER_TOKEN if group == PER_CHANNEL else GROUP_128}
    operands = jnp.asarray(weight), jnp.asarray(scale)
    rows = scale.reshape(n, -1) if n in shape else np.repeat(scale.reshape(-(-n // 128), -1), 128, 0)[:n]
    each = rows if rows.shape[1] == 1 else np.repeat(rows, 128, 1)[:, :k]
    want = (weight.astype(np.float64) * each).sum(0)
    for given in (operands, (Quantized(*operands, group),)):
        got = jax.grad(lambda x, given=given: fp8core.linear(x, *given, **options).sum())(jnp.asarray(x))
        np.testing.assert_allclose(got, np.broadcast_to(want, (3, k)), rtol=1e-4, atol=1e-3 * np.abs(want).max())


def test_the_backward_pass_keeps_the_codes_and_no_copy_of_the_weight():
    w = jax.tree.map(jnp.asarray, weight())
    _, backward = jax.vjp(lambda x: fp8core.linear(x, w), jnp.asarray(wide(5, K)))
    kept = [x for x in jax.tree.leaves(backward) if x.shape == (N, K)]
    assert [x.dtype for x in kept] == [jnp.float8_e4m3fn]


def test_what_has_no_gradient_says_so():
    x, w = jnp.asarray(wide(4, K)), jax.tree.map(jnp.asarray, weight())
    for words, call in (
        ("quantize needs to be outside of a gradient", lambda x: fp8core.quantize(x).dequantize().sum()),
        (
            "scaled_mm_nt needs to be outside",
            lambda s: fp8core.scaled_mm_nt(w.data, w.data, s, 1.0).astype(s.dtype).sum(),
        ),
        (
            "grouped_scaled_mm_nt needs to be outside",
            lambda s: (
                fp8core.grouped_scaled_mm_nt(w.data, w.data[None], s, 1.0, offs=jnp.full(1, N)).astype(s.dtype).sum()
            ),
        ),
        (
            "moe_permute needs to be outside of a gradient",
            lambda x: fp8core.moe_permute(x, jnp.zeros((4, 2), jnp.int32), 3).rows.astype(x.dtype).sum(),
        ),
        (
            "moe_unpermute needs to be outside of a gradient",
            lambda x: fp8core.moe_unpermute(x, jnp.zeros((4, 2), jnp.int32)).sum(),
        ),
        (
            "linear of an x that is FP8 needs to be outside of a gradient",
            lambda s: fp8core.linear(w, w, bias=s).astype(s.dtype).sum(),
        ),
        (
            "linear needs to be without an activation inside of a gradient, got gelu",
            lambda s: fp8core.linear(x * s[0], w, activation="gelu").astype(s.dtype).sum(),
        ),
        (
            "weight_scale needs to be outside of a gradient",
            lambda s: fp8core.linear(x, w.data, s[:, None]).astype(s.dtype).sum(),
        ),
        (
            "input_scale needs to be outside of a gradient",
            lambda s: fp8core.linear(x, w, input_scale=s[:1]).astype(s.dtype).sum(),
        ),
        (
            "scale_ub needs to be outside of a gradient",
            lambda s: fp8core.linear(x, w, scale_ub=s[:1]).astype(s.dtype).sum(),
        ),
    ):
        with pytest.raises(UnsupportedProblemError, match=words):
            jax.grad(call)(x.astype(jnp.float32) if "quantize" in words or "moe" in words else w.scale[:, 0])
    stopped = jax.grad(lambda x: (x * fp8core.quantize(jax.lax.stop_gradient(x)).dequantize()).sum())(x)
    assert stopped.shape == x.shape


def test_a_tracer_that_is_to_be_written_is_a_tracer():
    w, x, old = weight(), wide(4, K), jnp.asarray(wide(N, N, dtype=np.float32))

    def added(old, codes=jnp.asarray):
        return fp8core.jax.scaled_mm_nt(
            codes(w.data), codes(w.data), codes(w.scale), codes(w.scale), out_dtype=old.dtype, beta=0.5, out=old
        )[0]

    def normed(residual):
        return fp8core.jax.rms_norm_quant(jnp.asarray(x), jnp.ones(K, x.dtype), 1e-6, residual=residual)[1]

    for call, given in ((added, old), (normed, jnp.asarray(x))):
        with pytest.raises(UnsupportedProblemError, match="needs to be outside of a gradient"):
            jax.grad(lambda old, call=call: call(old).astype(jnp.float32).sum())(given)
    assert same(jax.jit(lambda old: added(old, np.asarray))(old), added(old))  # arrays of NumPy become constants


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
