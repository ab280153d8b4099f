"""Calls of mixtures of experts on several devices; `sharded` runs them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, Quantized
from jax_ffi.cases import GROUPS, K, N, choices, ends, near, stacked, wide
from jax_ffi.meshes import check, collectives, put


def grouped(kind, mesh):
    """Channels are divided, and rows are not, as ends of groups count those of the whole array."""
    offs, bias = ends(16, 16), wide(GROUPS, N, seed=4)
    call = lambda *given: fp8core.grouped_scaled_mm_nt(*given[:4], bias=given[4], offs=given[5])  # noqa: E731
    for of_a, of_weight in ((PER_TOKEN, PER_CHANNEL), (GROUP_128, BLOCK_128), (GROUP_128, GROUP_128)):
        (a, sa), (w, sb) = fp8core.quantize(wide(16, K), group_shape=of_a), stacked(of_weight)
        wanted = call(a, w, sa, sb, bias, offs)
        weights = put(mesh, w, None, "b"), put(mesh, sb, None, "b"), put(mesh, bias, None, "b")
        for rows in (None, "a"):
            name, allowed = f"{kind} grouped {of_weight} {rows}", ("all-gather", "dynamic-slice") if rows else ()
            given = put(mesh, a, rows), weights[0], put(mesh, sa, rows), weights[1], weights[2], offs
            made, found = jax.jit(call)(*given), collectives(call, *given)
            assert made.sharding.spec[1] == "b", made.sharding
            check(name, made, wanted, found, allowed, alike=near)
        over = put(mesh, a), put(mesh, w, None, None, "a"), put(mesh, sa), put(mesh, sb), put(mesh, bias, None, "a")
        check(f"{kind} grouped {of_weight} along k", jax.jit(call)(*over, put(mesh, offs)), wanted, alike=near)
    (a, sa), (w, sb) = fp8core.quantize(wide(16, K)), stacked(PER_TENSOR)
    for scale in (sb, sb[:, 0], sb[0, 0], sb[:1, 0]):
        given, spec = (a, w, sa, scale, bias, offs), (None, "b")
        made = jax.jit(call)(a, put(mesh, w, *spec), sa, scale, put(mesh, bias, *spec), offs)
        check(f"{kind} grouped, scale {scale.shape}", made, call(*given), alike=near)


def grouped_by_hand(kind, mesh):
    """Each device has experts of its own, and the rows that are sent to them."""
    a, (w, sb), offs = fp8core.quantize(wide(16, K)), stacked(), (ends(8, 8), ends(8, 5))
    parts = [
        (a.data[rows], weight, a.scale[rows], scale, of)
        for rows, weight, scale, of in (
            (slice(8), w, sb, offs[0]),
            (slice(8, 16), w[::-1].copy(), sb[::-1].copy(), offs[1]),
        )
    ]
    call = lambda a, w, sa, sb, offs: fp8core.grouped_scaled_mm_nt(a, w, sa, sb, offs=offs)  # noqa: E731
    wanted = np.concatenate([call(*part) for part in parts])[:13]
    over = [put(mesh, np.concatenate(every), "a") for every in zip(*parts, strict=True)]
    for varying in (True, False):
        layer = jax.shard_map(call, mesh=mesh, in_specs=(P("a"),) * 5, out_specs=P("a"), check_vma=varying)
        made = np.asarray(jax.jit(layer)(*over))[:13]
        check(f"{kind} grouped shard_map {varying}", made, wanted, collectives(layer, *over), alike=near)


def mixtures(kind, mesh):
    """Sums are divided by tokens and columns; sorted rows are whole, as places count those of the whole array."""
    x, ids, shares, sums = wide(16, K), choices(16), wide(16, 2, dtype=np.float32), fp8core.moe_unpermute
    permute = lambda x, ids: tuple(fp8core.moe_permute(x, ids, GROUPS))  # noqa: E731
    rows, _, inverse = wanted = permute(x, ids)
    for spec in (("a",), (None, "b"), (("a", "b"),)):
        check(f"{kind} moe_permute {spec}", jax.jit(permute)(put(mesh, x, *spec), put(mesh, ids, *spec[:1])), wanted)
    for tokens, columns in (("a", "b"), (None, "b"), (("a", "b"), None)):
        given = put(mesh, rows, None, columns), put(mesh, inverse, tokens), put(mesh, shares, tokens)
        made = jax.jit(sums)(*given)
        assert made.sharding.is_equivalent_to(NamedSharding(mesh, P(tokens, columns)), 2), made.sharding
        name = f"{kind} moe_unpermute {tokens} {columns}"
        check(name, made, sums(rows, inverse, shares), collectives(sums, *given))
    made = jax.jit(sums)(put(mesh, rows, "a"), put(mesh, inverse, None, "b"), put(mesh, shares, None, "b"))
    check(f"{kind} moe_unpermute of divided rows and choices", made, sums(rows, inverse, shares))


def mixtures_by_hand(kind, mesh):
    """Each device has experts of its own, and leaves out the choices of others."""
    x, ids, shares = wide(16, K), choices(16), wide(16, 2, dtype=np.float32)
    w, sb = (np.concatenate((of, of[:1])) for of in stacked())

    def call(x, ids, shares, w, sb, first=0):
        rows, offs, inverse = fp8core.moe_permute(fp8core.quantize(x), ids - first, len(w))
        y = fp8core.grouped_scaled_mm_nt(rows, w, scale_b=sb, offs=offs)
        return fp8core.moe_unpermute(y, inverse, shares, out_dtype="float32")

    def part(*given):
        return jax.lax.psum(call(*given, first=jax.lax.axis_index("a") * len(given[3])), "a")

    over = *(put(mesh, of) for of in (x, ids, shares)), put(mesh, w, "a"), put(mesh, sb, "a")
    for varying in (True, False):
        specs = *(P(),) * 3, *(P("a"),) * 2
        layer = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=varying)
        check(f"{kind} mixture shard_map {varying}", jax.jit(layer)(*over), call(x, ids, shares, w, sb), alike=near)


def experts(kind, mesh):
    """A layer and rows for each of four experts, whose calls run in a loop."""
    x = wide(4, 6, K)
    each = [fp8core.quantize(wide(N, K, seed=seed)) for seed in range(4)]
    data, scale = (np.stack(parts) for parts in zip(*each, strict=True))
    call = jax.vmap(lambda x, data, scale: jnp.tanh(fp8core.linear(x, Quantized(data, scale, PER_CHANNEL))) + x[:, :1])
    wanted = jax.jit(call)(x, data, scale)
    for over in ("a", ("a", "b")):
        check(f"{kind} experts {over}", jax.jit(call)(*(put(mesh, one, over) for one in (x, data, scale))), wanted)
