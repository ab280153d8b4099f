"""What calls on JAX arrays refuse under jax.jit and eagerly, and with which words."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import fp8core  # noqa: E402 - after the skip
import fp8core.jax  # noqa: E402
from fp8core.errors import DeviceError, DTypeError, LayoutError, ScaleError, ShapeError  # noqa: E402
from jax_ffi.cases import K, N, cpu, ends, stacked, weight, wide  # noqa: E402, F401


def test_what_a_grouped_product_refuses():
    q, (w, scale) = jax.tree.map(jnp.asarray, fp8core.quantize(wide(4, K))), map(jnp.asarray, stacked())
    offs = jnp.asarray(ends(4, 4))
    for error, words, given in (
        (DTypeError, "offs needs int32, got float32", {"offs": offs.astype(jnp.float32)}),
        (ShapeError, r"offs needs shape \(3,\), .* got \(4,\): offs\[1:\] leaves out", {"offs": jnp.arange(4)}),
        (ShapeError, r"bias needs shape \(3, 256\), one row per group", {"bias": jnp.ones(N, jnp.bfloat16)}),
        (LayoutError, "out needs to be writable, .*: leave it out", {"out": jnp.ones((4, N), jnp.bfloat16)}),
    ):
        call = lambda q, given: fp8core.grouped_scaled_mm_nt(q, w, scale_b=scale, **{"offs": offs, **given})  # noqa: E731
        for run in (call, jax.jit(call)):
            with pytest.raises(error, match=words):
                run(q, given)
    with pytest.raises(LayoutError, match=r"offs needs an array of JAX inside of jax.jit, got builtins.list"):
        jax.jit(lambda q: fp8core.grouped_scaled_mm_nt(q, w, scale_b=scale, offs=[1, 2, 4]))(q)


def test_what_is_refused_while_jax_traces():
    x, w = jnp.asarray(wide(4, K)), jax.tree.map(jnp.asarray, weight())
    codes = x.astype(jnp.float8_e4m3fn)
    for error, words, call in (
        (DTypeError, "x needs .*, got int32", lambda x: fp8core.quantize(x.astype(jnp.int32))),
        (ShapeError, "group_shape needs a pair", lambda x: fp8core.quantize(x, group_shape=(1, 0))),
        (ScaleError, "scale_format needs one of", lambda x: fp8core.quantize(x, scale_format="ue4m3")),
        (LayoutError, "out needs to be writable, got an array of JAX", lambda x: fp8core.quantize(x, out=codes)),
        (LayoutError, r"fp8core\.jax\.rms_norm_quant", lambda x: fp8core.rms_norm_quant(x, x[0], 1e-6, residual=x)),
        (DeviceError, "stream needs to be left out inside of jax.jit", lambda x: fp8core.quantize(x, stream=0)),
        (LayoutError, r"x needs a value, got a tracer", lambda x: fp8core.all_close_1d(x[0].astype(jnp.float32))),
        (LayoutError, r"weight needs memory of its own, got a tracer", fp8core.Fp8Linear.from_weight),
        (LayoutError, "weight needs an array of JAX inside of jax.jit, got builtins.list",
         lambda x: fp8core.linear(x, [1], w.scale)),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            jax.jit(call)(x)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda scale: fp8core.quantize(None, scale=scale)),
        ("x", lambda weight: fp8core.rms_norm_quant(None, weight, 1e-6)),
        ("x", lambda scale: fp8core.silu_and_mul_quant(None, scale=scale)),
        ("x", lambda ids: fp8core.moe_permute(None, ids, 3)),
        ("y", lambda inverse: fp8core.moe_unpermute(None, inverse)),
        ("q", lambda scale: fp8core.dequantize(None, scale)),
        ("weight", lambda scale: fp8core.requantize_with_max_scale(None, scale, [1])),
        ("weight", lambda scale: fp8core.normalize_e4m3fn_to_e4m3fnuz(None, scale)),
    ],
)
def test_none_in_place_of_the_first_array_is_refused_while_jax_traces(name, call):
    with pytest.raises(DTypeError, match=f"^{name} needs an array, got None"):
        jax.jit(call)(jnp.ones(1))


def test_what_is_refused_of_eager_calls():
    x = jnp.asarray(wide(4, K))
    gone = jnp.array(x)
    gone.delete()
    with pytest.raises(LayoutError, match="x needs memory of its own, got one that was deleted or donated"):
        fp8core.quantize(gone)
    with pytest.raises(LayoutError, match="out needs to be writable"):
        fp8core.quantize(x, out=x.astype(jnp.float8_e4m3fn))
    with pytest.raises(ScaleError, match="scale needs a number that float32 holds"):
        fp8core.quantize(x, scale=1e300)
    key = jax.random.key(0)  # of an extended dtype, which NumPy does not know
    for call in (fp8core.quantize, jax.jit(fp8core.quantize)):
        with pytest.raises(DTypeError, match=r"x needs an array of .*, got key<fry>"):
            call(key)
    assert fp8core.all_close_1d(jnp.ones(3)) is True


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("x", lambda x, q: fp8core.jax.rms_norm_quant(np.asarray(x), x[0], 1e-6, residual=x)),
        ("weight", lambda x, q: fp8core.jax.rms_norm_quant(x, np.asarray(x[0]), 1e-6, residual=x)),
        ("residual", lambda x, q: fp8core.jax.rms_norm_quant(x, x[0], 1e-6, residual=np.asarray(x))),
        ("a", lambda x, q: fp8core.jax.scaled_mm(np.asarray(q.data), q.data.T, 0.5, 0.5)),
        ("weight", lambda x, q: fp8core.jax.scaled_mm_nt(q.data, [[1.0]], 0.5, 0.5)),
        ("bias", lambda x, q: fp8core.jax.scaled_mm_nt(q, q, bias=np.ones(4, np.float32))),
        ("out", lambda x, q: fp8core.jax.scaled_mm_nt(q, q, beta=1.0, out=np.ones((4, 4), np.float32))),
        ("x", lambda x, q: fp8core.jax.all_close_1d(np.ones(3, np.float32))),
    ],
)
def test_other_arrays_given_to_functions_of_jax_are_named(words, call):
    x = jnp.asarray(wide(4, K, dtype=np.float32))
    with pytest.raises(LayoutError, match=f"^{words} needs an array of JAX, got "):
        call(x, fp8core.quantize(x))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    ("refused", "call"),
    [
        (
            (DTypeError, "residual needs an array, got None: .* take fp8core.rms_norm_quant"),
            lambda x, q: fp8core.jax.rms_norm_quant(x, x[0], 1e-6, residual=None),
        ),
        (
            (LayoutError, "amax needs to be left out, as fp8core.jax.scaled_mm returns it, got "),
            lambda x, q: fp8core.jax.scaled_mm(q, q.T, amax=jnp.zeros(1)),
        ),
        (
            (LayoutError, "amax needs to be left out, as fp8core.jax.scaled_mm_nt returns it, got numpy.ndarray"),
            lambda x, q: fp8core.jax.scaled_mm_nt(q, q, amax=np.zeros(1, np.float32)),
        ),
    ],
)
def test_functions_of_jax_need_a_residual_and_take_no_amax(refused, call, jitted):
    x = jnp.asarray(wide(4, K, dtype=np.float32))
    error, words = refused
    with pytest.raises(error, match=f"^{words}"):
        (jax.jit(call) if jitted else call)(x, fp8core.quantize(x))


def test_functions_of_jax_take_no_stream():
    q = fp8core.quantize(jnp.ones((4, K)))
    with pytest.raises(DeviceError, match=r"stream needs to be left out, as the functions of fp8core\.jax"):
        fp8core.jax.scaled_mm_nt(q, q, stream=0)
    with pytest.raises(DTypeError, match="x needs an array, got None"):
        fp8core.jax.all_close_1d(None)
