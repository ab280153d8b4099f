"""Calls on several devices, in a process that `XLA_FLAGS` gives them; prints a line for each check that holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp8core
import fp8core.jax
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, Quantized
from jax_ffi.cases import K, N, near, weight, wide
from jax_ffi.meshes import COLLECTIVES, MESHES, check, collectives, put
from jax_ffi.sharded_experts import experts, grouped, grouped_by_hand, mixtures, mixtures_by_hand


def layers(kind, mesh):
    for of_weight, of_x in ((PER_CHANNEL, PER_TOKEN), (PER_TENSOR, PER_TOKEN), (BLOCK_128, GROUP_128)):
        x, w = wide(16, K), weight(of_weight)
        bias = wide(N, dtype=np.float32)
        wanted = fp8core.linear(x, w, bias=bias, group_shape=of_x)

        def layer(x, data, scale, bias, of_weight=of_weight, of_x=of_x):
            return fp8core.linear(x, Quantized(data, scale, of_weight), bias=bias, group_shape=of_x)

        for rows, channels in (("a", None), (None, "b"), ("a", "b"), (("a", "b"), None)):
            scales = () if of_weight == PER_TENSOR else (channels,)
            arrays = (
                put(mesh, x, rows),
                put(mesh, w.data, channels),
                put(mesh, w.scale, *scales),
                put(mesh, bias, channels),
            )
            made = jax.jit(layer)(*arrays)
            assert made.sharding.is_equivalent_to(NamedSharding(mesh, P(rows, channels)), 2), made.sharding
            check(f"{kind} linear {of_weight} {rows} {channels}", made, wanted, collectives(layer, *arrays), alike=near)


def products(kind, mesh):
    for of_a, of_weight in ((PER_TOKEN, PER_CHANNEL), (GROUP_128, BLOCK_128), (GROUP_128, GROUP_128)):
        a, w = fp8core.quantize(wide(16, K), group_shape=of_a), weight(of_weight)
        wanted = fp8core.scaled_mm_nt(a, w)
        arrays = put(mesh, a.data, "a"), put(mesh, a.scale, "a"), put(mesh, w.data, "b"), put(mesh, w.scale, "b")
        stored = lambda a, sa, w, sw: fp8core.scaled_mm_nt(a, w, sa, sw)  # noqa: E731
        turned = lambda a, sa, w, sw: fp8core.scaled_mm(a, w.T, sa, sw.T)  # noqa: E731
        for name, call in (("stored", stored), ("turned", turned)):
            check(f"{kind} {name} {of_weight}", jax.jit(call)(*arrays), wanted, collectives(call, *arrays), alike=near)
    for n in (128, 200):  # blocks that cannot be divided
        a, w = fp8core.quantize(wide(16, K), group_shape=GROUP_128), weight(BLOCK_128, n)
        divided = jax.tree.map(lambda x: put(mesh, x, "a"), a), Quantized(put(mesh, w.data, "b"), w.scale, BLOCK_128)
        made = jax.jit(fp8core.scaled_mm_nt)(*divided)
        check(f"{kind} {n} channels", made, fp8core.scaled_mm_nt(a, w), alike=near)
    for k in (100, 128):  # blocks along one axis only, which may lie: one for each 128 channels, beside each other
        x, w = wide(16, k), weight(BLOCK_128, 256, k)
        lying = put(mesh, w.data, "b"), w.scale.reshape(1, 2)
        made = jax.jit(lambda x, w, scale: fp8core.linear(x, w, scale, group_shape=GROUP_128))(x, *lying)
        check(f"{kind} blocks that lie, k = {k}", made, fp8core.linear(x, w, group_shape=GROUP_128), alike=near)
    a, w = fp8core.quantize(wide(16, 256), group_shape=GROUP_128), weight(BLOCK_128, 2, 256)
    turned = lambda a, w: fp8core.scaled_mm(a, w.T)  # noqa: E731 - its scale of b has the shape [n, 1] of channels
    made = jax.jit(turned)(a, Quantized(put(mesh, w.data, "b"), w.scale, BLOCK_128))
    check(f"{kind} two channels", made, fp8core.scaled_mm_nt(a, w), alike=near)
    a, w = fp8core.quantize(wide(16, K)), weight()
    arrays = put(mesh, a.data, "a"), put(mesh, a.scale, "a"), put(mesh, w.data, "b"), put(mesh, w.scale, "b")
    standing = lambda a, sa, w, sw: fp8core.scaled_mm(a, w.T, sa, sw)  # noqa: E731
    flat = lambda a, sa, w, sw: fp8core.scaled_mm(a, w.T, sa[:, 0], sw)  # noqa: E731
    for call in (standing, flat):
        found = collectives(call, *arrays)
        check(f"{kind} scales that stand", jax.jit(call)(*arrays), fp8core.scaled_mm_nt(a, w), found, alike=near)


def sums_and_maxima(kind, mesh):
    """What runs over an axis that the operands are divided along."""
    x = wide(16, K) * np.arange(1, 17)[:, None].astype("bfloat16")  # the maxima are in the last rows
    a, w = fp8core.quantize(x), weight()
    given = Quantized(put(mesh, a.data, "a", "b"), a.scale, PER_TOKEN), Quantized(put(mesh, w.data, None, "b"), w.scale)
    check(f"{kind} along k", jax.jit(fp8core.scaled_mm_nt)(*given), fp8core.scaled_mm_nt(a, w), alike=near)
    layer = lambda x, **static: fp8core.linear(x, w, group_shape=PER_TENSOR, **static)  # noqa: E731
    check(f"{kind} one scale of x", jax.jit(layer)(put(mesh, x, "a")), layer(x), alike=near)
    static, given = lambda x: layer(x, input_scale=0.5), put(mesh, x, "a")
    check(f"{kind} given scale of x", jax.jit(static)(given), static(x), collectives(static, given), alike=near)
    made = jax.jit(lambda a, scale: fp8core.jax.scaled_mm_nt(a, w.data, scale, w.scale)[1])
    wanted = np.zeros(1, np.float32)
    fp8core.scaled_mm_nt(a, w, amax=wanted)
    check(f"{kind} amax", made(put(mesh, a.data, "a"), put(mesh, a.scale, "a")), wanted, alike=near)


def rows_and_columns(kind, mesh):
    """Scales with as many numbers as there are rows: one belongs to columns, one to rows of two axes; and ends of groups."""
    group = -1, 32
    q, scale = wide(16, K).astype("float8_e4m3fn"), np.arange(1, 17, dtype=np.float32)
    for name, call in (
        ("dequantized", lambda q, scale: fp8core.dequantize(q, scale, group_shape=group)),
        ("quantized", lambda x, scale: fp8core.quantize(x, scale=scale, group_shape=group).data),
    ):
        for spec in (("a",), (None, "b")):
            given = q if name == "dequantized" else wide(16, K)
            made = jax.jit(call)(put(mesh, given, *spec), put(mesh, scale, "a"))
            check(f"{kind} columns {name} {spec}", made, call(given, scale))
    q, scale = wide(4, 2, K).astype("float8_e4m3fn"), np.arange(1, 9, dtype=np.float32)[:, None]
    call = lambda q, scale: fp8core.dequantize(q, scale, group_shape=PER_TOKEN)  # noqa: E731
    check(f"{kind} rows of two axes", jax.jit(call)(put(mesh, q, "a"), put(mesh, scale, "a")), call(q, scale))
    q, scale = wide(16, 600).astype("float8_e4m3fn"), wide(16, 5, dtype=np.float32)
    call = lambda q, scale: fp8core.dequantize(q, scale, group_shape=GROUP_128)  # noqa: E731
    check(f"{kind} ends of groups", jax.jit(call)(put(mesh, q, "a"), put(mesh, scale, "a")), call(q, scale))


def groups_along_an_axis(kind, mesh):
    """Groups that span an axis, which may be divided as their scales are given."""
    for group, spec, shape in (((-1, 32), ("a",), (1, K // 32)), ((1, K), ("a", "b"), (16, 1))):
        x, scale = wide(16, K), wide(*shape, dtype=np.float32)
        for name, given, call in (
            ("quantized", x, lambda x, scale, of=group: fp8core.quantize(x, scale=scale, group_shape=of).data),
            (
                "dequantized",
                x.astype("float8_e4m3fn"),
                lambda q, scale, of=group: fp8core.dequantize(q, scale, group_shape=of),
            ),
        ):
            arrays = (
                put(mesh, given, *spec),
                put(mesh, scale, *(of if n > 1 else None for of, n in zip(spec, shape, strict=False))),
            )
            check(f"{kind} {group} {name}", jax.jit(call)(*arrays), call(given, scale), collectives(call, *arrays))


def groups_of_rows(kind, mesh):
    """Groups of rows that one device would not have whole."""
    group = 2, 64
    x = wide(4, 2, K)
    scale = np.asarray(fp8core.quantize(x, group_shape=group).scale)
    for name, call in (
        ("quantized", lambda x, scale: fp8core.quantize(x, scale=scale, group_shape=group).data),
        ("dequantized", lambda q, scale: fp8core.dequantize(q, scale, group_shape=group)),
    ):
        given = x if name == "quantized" else fp8core.quantize(x, group_shape=group).data
        check(
            f"{kind} rows {name}", jax.jit(call)(put(mesh, given, "b", "a"), put(mesh, scale, "b")), call(given, scale)
        )


def groups_that_devices_cannot_share(kind, mesh):
    """One group, two or six, on an axis of four devices; groups whose scale is given; and a scale for each column."""
    four = jax.make_mesh((4,), ("all",), axis_types=mesh.axis_types[:1])
    for group, k in ((GROUP_128, 128), (GROUP_128, 256), (GROUP_128, 768), ((-1, 1), 256)):
        x = wide(16, k)
        call = lambda x, group=group: tuple(fp8core.quantize(x, group_shape=group))  # noqa: E731
        check(f"{kind} {group} of {k}", jax.jit(call)(put(four, x, None, "all")), call(x))
    x, scale = wide(16, K), fp8core.quantize(wide(16, K), group_shape=GROUP_128).scale
    call = lambda x, scale: fp8core.quantize(x, scale=scale, group_shape=GROUP_128).data  # noqa: E731
    check(f"{kind} given", jax.jit(call)(put(four, x, None, "all"), scale), call(x, scale))
    x, w = wide(16, K), weight(BLOCK_128, 256)
    call = lambda x, data, scale: fp8core.linear(x, Quantized(data, scale, BLOCK_128), group_shape=GROUP_128)  # noqa: E731
    made = jax.jit(call)(x, put(four, w.data, "all"), put(four, w.scale))
    check(f"{kind} two blocks", made, call(x, *w), alike=near)


def ones(x):
    return (np if isinstance(x, np.ndarray) else jnp).ones(K, np.float32)


def normed(x):
    """The norm of a sum, and the sum."""
    x = jnp.asarray(x)
    return tuple(jax.tree.leaves(fp8core.jax.rms_norm_quant(x, ones(x), 1e-6, residual=x)))


def requantized(x):
    scales = np.array([0.5, 2], np.float32) if isinstance(x, np.ndarray) else jnp.array([0.5, 2])
    return tuple(fp8core.requantize_with_max_scale(x.astype("float8_e4m3fn"), scales, [7, 9]))


def by_groups(x):
    """The scales of groups, given."""
    return fp8core.quantize(x, scale=fp8core.quantize(x, group_shape=GROUP_128).scale, group_shape=GROUP_128).data


def quantizations(kind, mesh):
    x = wide(16, K)
    for name, spec, call in (
        ("token", ("a",), lambda x: tuple(fp8core.quantize(x))),
        ("group", ("a", "b"), lambda x: tuple(fp8core.quantize(x, group_shape=GROUP_128))),
        ("static", ("a", "b"), lambda x: fp8core.quantize(x, scale=0.5).data),
        ("static rows", ("a", "b"), lambda x: fp8core.quantize(x, scale=ones(x)[:16, None]).data),
        (
            "static rows of one axis",
            ("a", "b"),
            lambda x: fp8core.quantize(x, scale=ones(x)[:16], group_shape=PER_TOKEN).data,
        ),
        ("static groups", ("a", "b"), by_groups),
        ("static columns", ("a", "b"), lambda x: fp8core.quantize(x[None], scale=0.5, group_shape=PER_TENSOR).data),
        ("silu", (("a", "b"),), lambda x: tuple(fp8core.silu_and_mul_quant(x))),
        ("norm", ("b",), lambda x: tuple(fp8core.rms_norm_quant(x, ones(x), 1e-6))),
        ("norm of a sum", ("b",), normed),
        ("requantized", (None, ("a", "b")), requantized),
        (
            "fnuz",
            ("a", "b"),
            lambda x: fp8core.normalize_e4m3fn_to_e4m3fnuz(x.astype("float8_e4m3fn"), ones(x)[:1])[:2],
        ),
        ("back", ("a", "b"), lambda x: fp8core.quantize(x, group_shape=GROUP_128).dequantize()),
        (
            "back by rows",
            ("a", "b"),
            lambda x: fp8core.dequantize(x.astype("float8_e4m3fn"), ones(x)[:16], group_shape=PER_TOKEN),
        ),
        (
            "back by one",
            ("a", "b"),
            lambda x: fp8core.dequantize(x.astype("float8_e4m3fn"), 0.5, group_shape=PER_TENSOR),
        ),
    ):
        given = put(mesh, x, *spec)
        check(f"{kind} quantize {name}", jax.jit(call)(given), call(x), collectives(call, given))
        check(f"{kind} eager {name}", call(given), call(x))
    for name, spec, whole in (
        ("one scale for all", ("a",), lambda x: tuple(fp8core.quantize(x, group_shape=PER_TENSOR))),
        ("rows of widths", ("a",), requantized),
        ("rows and padding", ("a",), lambda x: tuple(fp8core.quantize(x, rows_padded=24))),
        ("parts of rows", (None, "b"), lambda x: tuple(fp8core.quantize(x))),
        ("parts of halves", (None, "b"), lambda x: tuple(fp8core.silu_and_mul_quant(x, group_shape=GROUP_128))),
        (
            "parts of norms",
            (None, "b"),
            lambda x: tuple(fp8core.rms_norm_quant(x, ones(x), 1e-6, group_shape=GROUP_128)),
        ),
        ("parts of static norms", (None, "b"), lambda x: fp8core.rms_norm_quant(x, ones(x), 1e-6, scale=0.5).data),
    ):
        given = put(mesh, x, *spec)
        check(f"{kind} {name}", jax.jit(whole)(given), whole(x), collectives(whole, given), COLLECTIVES)


def by_hand(kind, mesh):
    x, w = wide(16, K), weight()
    specs = P("a"), P("b"), P("b")
    wanted = fp8core.linear(x, w)
    for varying in (True, False):
        layer = jax.shard_map(
            lambda x, data, scale: fp8core.linear(x, Quantized(data, scale, PER_CHANNEL)),
            mesh=mesh,
            in_specs=specs,
            out_specs=P("a", "b"),
            check_vma=varying,
        )
        arrays = [put(mesh, one, *spec) for one, spec in zip((x, *w), specs, strict=True)]
        check(f"{kind} shard_map {varying}", jax.jit(layer)(*arrays), wanted, collectives(layer, *arrays), alike=near)
        program = export.export(jax.jit(layer), disabled_checks=[export.DisabledSafetyCheck.custom_call("fp8core")])
        check(f"{kind} exported {varying}", program(*arrays).call(*arrays), wanted, alike=near)


def partly_by_hand(kind, mesh):
    """Over one of two axes: what the other one divides is gathered."""
    x, w = wide(16, K), weight()
    layer = jax.shard_map(
        lambda x, data, scale: fp8core.linear(x, Quantized(data, scale, PER_CHANNEL)),
        mesh=mesh,
        in_specs=(P("a"), P(), P()),
        out_specs=P("a"),
        axis_names={"a"},
    )
    for other in (None, "b"):
        given = put(mesh, x, "a", other), *(put(mesh, one, other) for one in w)
        check(f"{kind} shard_map over one axis, {other}", jax.jit(layer)(*given), fp8core.linear(x, w), alike=near)


def scanned_and_mapped(kind, mesh):
    """Rows that stay divided through layers that are scanned, and a batch that is."""
    each = [fp8core.quantize(wide(K, K, seed=seed) / 16) for seed in range(3)]
    data, scale = (jnp.stack([jnp.asarray(part) for part in parts]) for parts in zip(*each, strict=True))
    x = wide(16, K)

    def scanned(x, data, scale):
        layer = lambda x, w: (fp8core.linear(x, Quantized(*w, PER_CHANNEL)), None)  # noqa: E731
        return jax.lax.scan(layer, x, (data, scale))[0]

    wanted = x
    for layer in each:
        wanted = fp8core.linear(wanted, layer)
    arrays = put(mesh, x, "a"), put(mesh, data), put(mesh, scale)
    found = [name for name in collectives(scanned, *arrays) if name != "dynamic-slice"]  # of the weights of a layer
    check(f"{kind} scan", jax.jit(scanned)(*arrays), wanted, found, alike=near)
    batch, mapped = put(mesh, np.stack([x, x]), "b", "a"), jax.vmap(lambda x: fp8core.linear(x, each[0]))
    made = jax.jit(mapped)(batch)
    check(f"{kind} vmap", np.asarray(made)[1], fp8core.linear(x, each[0]), collectives(mapped, batch), alike=near)


def without_a_sharding(kind, mesh):
    """Arrays that were made before the mesh of the context, and are on no mesh."""
    x, w = jnp.asarray(wide(16, K)), jax.tree.map(jnp.asarray, weight())
    scales, wanted = jnp.ones(8), fp8core.linear(x, w)
    with jax.set_mesh(mesh):
        check(f"{kind} eager in a context", fp8core.linear(x, w), wanted)
        check(f"{kind} jit in a context", jax.jit(fp8core.linear)(x, w), wanted)
        assert fp8core.all_close_1d(scales)
        assert fp8core.all_close_1d(jnp.ones(8))  # on all devices
        assert not fp8core.all_close_1d(put(mesh, jnp.arange(8, dtype=np.float32), "a"))


def in_a_context(kind, mesh):
    """Arrays that are divided over the mesh of the context stay divided."""
    x, w = wide(16, K), weight()
    layer = lambda x, data, scale: fp8core.linear(x, Quantized(data, scale, PER_CHANNEL))  # noqa: E731
    arrays = put(mesh, x, "a"), put(mesh, w.data, "b"), put(mesh, w.scale, "b")
    with jax.set_mesh(mesh):
        made, found = jax.jit(layer)(*arrays), collectives(layer, *arrays)
    check(f"{kind} divided in a context", made, fp8core.linear(x, w), found, alike=near)


def gradients(kind, mesh):
    x, w = wide(16, K, dtype=np.float32), weight()
    loss = lambda x, w: (fp8core.linear(x, w) ** 2).sum()  # noqa: E731
    wanted = jax.grad(loss)(jnp.asarray(x), w)
    made = jax.jit(jax.grad(loss))(put(mesh, x, "a"), w)
    np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-3)
    tangent = wide(16, K, dtype=np.float32, seed=5)
    along = jax.jvp(lambda x: fp8core.linear(x, w), (jnp.asarray(x),), (jnp.asarray(tangent),))[1]
    for spec, of_weight in ((("a",), ("b",)), (("a", "b"), ()), ((None, "b"), ("a", "b")), ((), (("a", "b"),))):
        divided = Quantized(put(mesh, w.data, *of_weight), put(mesh, w.scale, *of_weight[:1]), PER_CHANNEL)
        made = jax.jit(jax.grad(loss))(put(mesh, x, *spec), divided)
        np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-3)
        pair = [(put(mesh, one, *spec),) for one in (x, tangent)]
        made = jax.jit(lambda w, *pair: jax.jvp(lambda x: fp8core.linear(x, w), *pair)[1])(divided, *pair)
        np.testing.assert_allclose(made, along, rtol=1e-4, atol=1e-3)
    print(f"{kind} gradient")


def beside_other_frameworks(far, mesh):
    """Calls that are no programs of JAX: their results are where the first operand is."""
    w, at = weight(), far.devices()
    near_weight = jax.tree.map(lambda x: jax.device_put(x, *at), w)
    mixed = fp8core.linear(far, w), *fp8core.quantize(far, stream=0)
    layer = fp8core.Fp8Linear(near_weight, input_scale=0.5, group_shape=PER_TENSOR)
    made = layer(far)
    assert all(x.devices() == at for x in (*mixed, layer.input_scale, made))
    assert near(mixed[0], fp8core.linear(np.asarray(far), w))
    assert near(made, fp8core.linear(np.asarray(far), w, input_scale=0.5, group_shape=PER_TENSOR))
    for call in (lambda x: fp8core.linear(x, w), fp8core.Fp8Linear.from_weight):
        with pytest.raises(
            fp8core.LayoutError, match=r"needs to be on one device here, got an array on 4: calls whose"
        ):
            call(put(mesh, wide(4, K), "a"))


if __name__ == "__main__":
    assert len(jax.devices()) == 4
    for kind, mesh in MESHES.items():
        for part in (
            layers,
            products,
            sums_and_maxima,
            grouped,
            grouped_by_hand,
            mixtures,
            mixtures_by_hand,
            rows_and_columns,
            groups_along_an_axis,
            groups_of_rows,
            groups_that_devices_cannot_share,
            quantizations,
            by_hand,
            partly_by_hand,
            scanned_and_mapped,
            experts,
            without_a_sharding,
            in_a_context,
            gradients,
        ):
            part(kind, mesh)
    far = jax.device_put(wide(4, K), jax.devices()[3])
    assert fp8core.quantize(far).scale.devices() == {jax.devices()[3]}
    assert fp8core.quantize(far, scale=0.5).scale.devices() == {jax.devices()[3]}
    apart = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[1]), weight())
    with pytest.raises(fp8core.DeviceError, match=r"weight needs to be where x is, on cpu:3, got cpu:1"):
        fp8core.linear(far, apart)
    for mesh in MESHES.values():
        beside_other_frameworks(far, mesh)
        for spec in ((), ("a",)):
            with pytest.raises(fp8core.UnsupportedProblemError, match=r"host +unable: needs a scale per token"):
                fp8core.silu_and_mul_quant(put(mesh, wide(4, K), *spec), group_shape=PER_TENSOR)
    jax.set_mesh(mesh)  # stays until the process ends, which waits for its programs
    print("all")
