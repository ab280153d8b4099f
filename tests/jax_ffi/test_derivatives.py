"""Gradients and derivatives of calls: those of `linear`, and refusals of the others."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import fp8core  # noqa: E402 - after the skip
import fp8core.jax  # noqa: E402
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, Quantized  # noqa: E402
from fp8core.errors import UnsupportedProblemError  # noqa: E402
from jax_ffi.cases import K, N, cpu, near, same, weight, wide  # noqa: E402, F401
from support.engines import fresh, fresh_fp8, fresh_scale  # noqa: E402


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


@pytest.mark.parametrize("of_bias", ["float32", "bfloat16"])
def test_the_gradient_of_a_bias_is_rounded_once(of_bias):
    """A sum in bfloat16 would lose rows: 256 + 1 is 256 there."""
    x, bias, w = jnp.ones((4096, K), jnp.bfloat16), jnp.zeros(N, of_bias), jax.tree.map(jnp.asarray, weight())
    factors = jnp.asarray(fresh((4096, N), "bfloat16"))
    for wrapped in (lambda f: f, jax.jit):
        grad = wrapped(lambda bias, g: jax.vjp(lambda bias: fp8core.linear(x, w, bias=bias), bias)[1](g)[0])
        assert (grad(bias, jnp.ones_like(factors)) == 4096).all()
        wanted = np.asarray(factors, np.float64).sum(0)
        np.testing.assert_allclose(np.asarray(grad(bias, factors), np.float64), wanted, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_derivatives_have_the_range_of_the_result(out_dtype):
    """float16, the dtype of x, does not hold 1e5."""
    x, w = jnp.ones((1, K), jnp.float16), jax.tree.map(jnp.asarray, fp8core.quantize(wide(N, K, seed=1) / 16))
    wide_w = np.asarray(w.dequantize(), np.float64)
    grad = jnp.zeros((1, N), out_dtype).at[0, 0].set(1e5)
    for wrapped in (lambda f: f, jax.jit):
        back = wrapped(lambda x, grad: jax.vjp(lambda x: fp8core.linear(x, w, out_dtype=out_dtype), x)[1](grad)[0])
        along = wrapped(lambda x, t: jax.jvp(lambda x: fp8core.linear(x, w, out_dtype=out_dtype), (x,), (t,))[1])
        for made, wanted in (
            (back(x, grad), 1e5 * wide_w[:1]),
            (along(x, 6e4 * x), 6e4 * wide_w.sum(1)[None]),
        ):
            np.testing.assert_allclose(np.asarray(made, np.float64), wanted, atol=2**-7 * np.abs(wanted).max())


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
