"""Exported programs: extents that are open until they run, and devices that this process does not have."""

import dataclasses

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy
export = pytest.importorskip("jax.export")

import fp8core  # noqa: E402 - after the skip
import fp8core.jax  # noqa: E402
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, Quantized, w8a8  # noqa: E402
from fp8core.errors import ShapeError  # noqa: E402
from fp8core.jax import handler, programs  # noqa: E402
from fp8core.jax.scratch import most_scratch  # noqa: E402
from fp8core.kernels.moe import counts_bytes  # noqa: E402
from fp8core.problem import MoePermute  # noqa: E402
from fp8core.target import HOST  # noqa: E402
from jax_ffi.cases import K, N, cpu, ends, same, stacked, weight, wide  # noqa: E402, F401
from support.targets import H200, MI250  # noqa: E402

CHECKS = [export.DisabledSafetyCheck.custom_call("fp8core")]


def exported(function, *shapes, platforms=("cpu",)):
    return export.export(jax.jit(function), disabled_checks=CHECKS, platforms=platforms)(*shapes)


def _linear(groups):
    return lambda x, data, scale: fp8core.linear(x, Quantized(data, scale, groups[0]), group_shape=groups[1])


def _product(groups):
    def product(x, data, scale):
        return fp8core.scaled_mm(
            fp8core.quantize(x, group_shape=groups[1]), Quantized(data, scale, groups[0]).T, out_dtype="float32"
        )

    return product


@pytest.mark.parametrize("make", [_linear, _product])
@pytest.mark.parametrize(
    "groups",
    [(PER_CHANNEL, PER_TOKEN), (BLOCK_128, GROUP_128), (PER_TENSOR, PER_TENSOR)],
    ids=["row", "block", "tensor"],
)
def test_rows_are_open(make, groups):
    function, w = make(groups), weight(groups[0])
    (rows,) = export.symbolic_shape("rows")
    made = exported(function, jax.ShapeDtypeStruct((rows, K), jnp.bfloat16), *w)
    for m in (1, 5, 16, 300):
        x = wide(m, K)
        assert same(made.call(x, *w), function(x, *w))


def test_every_extent_of_a_layer_is_open():
    batch, rows, n, k = export.symbolic_shape("batch, rows, n, k")
    made = exported(
        _linear((PER_CHANNEL, PER_TOKEN)),
        jax.ShapeDtypeStruct((batch, rows, k), jnp.float16),
        jax.ShapeDtypeStruct((n, k), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((n, 1), jnp.float32),
    )
    for shape, of_weight in (((2, 3, 64), 24), ((1, 1, 33), 7), ((3, 5, 512), 256)):
        x, w = wide(*shape, dtype=np.float16), weight(n=of_weight, k=shape[-1])
        assert same(made.call(x, *w), fp8core.linear(x, w))


def test_every_extent_of_a_grouped_product_is_open():
    groups, rows, n, k = export.symbolic_shape("groups, rows, n, k")
    codes, floats, bias = jnp.float8_e4m3fn, jnp.float32, jnp.bfloat16

    def product(a, sa, w, sb, bias, offs):
        return fp8core.grouped_scaled_mm_nt(a, w, sa, sb, bias=bias, offs=offs)

    shapes = ((rows, k), codes), ((rows, 1), floats), ((groups, n, k), codes), ((groups, n, 1), floats)
    shapes = *shapes, ((groups, n), bias), ((groups,), jnp.int32)
    made = export.deserialize(exported(product, *(jax.ShapeDtypeStruct(*of) for of in shapes)).serialize())
    (w, sb), b = stacked(), wide(3, N, seed=4)
    for m, count in ((1, 3), (5, 3), (300, 2), (7, 1)):
        given = *fp8core.quantize(wide(m, K)), w[:count], sb[:count], b[:count], ends(m, m)[-count:]
        assert same(made.call(*given), product(*given))
    narrow = *fp8core.quantize(wide(5, 33)), w[:, :7, :33].copy(), sb[:, :7], b[:, :7], ends(5, 5)
    assert same(made.call(*narrow), product(*map(np.ascontiguousarray, narrow)))


def test_every_extent_of_a_mixture_of_experts_is_open():
    """Tokens, choices and columns; how many experts there are is an option."""
    tokens, each, cols = export.symbolic_shape("tokens, each, cols")

    def mixture(x, ids, shares):
        rows, offs, inverse = fp8core.moe_permute(fp8core.quantize(x), ids, 5)
        plain = fp8core.moe_unpermute(fp8core.moe_permute(x, ids, 5).rows, inverse, shares)
        return fp8core.moe_unpermute(rows.dequantize(), inverse, shares, out_dtype="float16"), plain, offs, inverse

    shapes = ((tokens, cols), jnp.bfloat16), ((tokens, each), jnp.int32), ((tokens, each), jnp.float32)
    made = export.deserialize(exported(mixture, *(jax.ShapeDtypeStruct(*of) for of in shapes)).serialize())
    for m, k, n in ((1, 1, 8), (7, 3, 100), (1500, 2, 64)):
        ids = (np.arange(m * k, dtype=np.int32) * 3 % 7 - 1).reshape(m, k)
        given = wide(m, n), ids, wide(m, k, dtype=np.float32)
        assert same(made.call(*given), mixture(*given))


@pytest.mark.parametrize("out_dtype", [None, "float16", jnp.bfloat16, np.dtype("float32")])
@pytest.mark.parametrize("groups", [(PER_CHANNEL, PER_TOKEN), (BLOCK_128, GROUP_128)])
def test_a_layer_goes_into_a_saved_program_and_a_pair_comes_out(groups, out_dtype):
    layer = fp8core.jax.Fp8Linear.from_weight(
        jnp.asarray(wide(N, K)), weight_group_shape=groups[0], group_shape=groups[1], out_dtype=out_dtype
    )

    def function(layer, x):
        return layer(x), fp8core.quantize(x, group_shape=groups[1])

    x = wide(5, K)
    read = export.deserialize(exported(function, layer, x).serialize())
    made, pair = read.call(layer, x)
    wanted, same_pair = function(layer, jnp.asarray(x))
    assert same(made, wanted)
    assert (pair.group_shape.rows, pair.group_shape.cols) == groups[1]
    assert same(tuple(pair), tuple(same_pair))
    if out_dtype is not None:  # spelled otherwise
        for alike in (np.dtype(out_dtype), np.dtype(out_dtype).type, np.dtype(out_dtype).name):
            assert same(read.call(dataclasses.replace(layer, out_dtype=alike), x)[0], made)
    with pytest.raises(ValueError, match="metadata does not match"):  # a layer of other options is not that layer
        read.call(dataclasses.replace(layer, batch_invariant=True), x)


def test_a_pair_without_a_group_shape_goes_through_a_saved_program():
    given = Quantized(*fp8core.quantize(jnp.asarray(wide(5, K))))
    made = export.deserialize(exported(lambda q: q, given).serialize()).call(given)
    assert made.group_shape is None
    assert same(tuple(made), tuple(given))


def test_a_product_by_the_names_of_vllm_has_open_rows():
    def product(a, w):
        return w8a8.cutlass_w8a8_scaled_mm(
            qinput=a, weight=w.T, out_dtype="float32", scale_a=0.5, scale_b=2.0, bias=None, output_shape=(a.shape[0], N)
        )

    w, (rows,) = weight()[0], export.symbolic_shape("rows")
    made = exported(product, jax.ShapeDtypeStruct((rows, K), jnp.float8_e4m3fn), w)
    for m in (1, 5):
        codes = fp8core.quantize(wide(m, K)).data
        assert same(made.call(codes, w), product(codes, w))


def test_symbols_that_results_follow_from_are_refused():
    (rows,) = export.symbolic_shape("rows")
    with pytest.raises(ShapeError, match="quantize needs extents of results that are products of extents"):
        exported(
            lambda x: tuple(fp8core.quantize(x, group_shape=BLOCK_128)), jax.ShapeDtypeStruct((rows, K), jnp.float32)
        )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tuple(fp8core.quantize(x, rows_padded=24)),
        lambda x: jax.vmap(lambda x: tuple(fp8core.quantize(x, rows_padded=24)))(x[None]),
        lambda x: w8a8.scaled_fp8_quant(x, num_token_padding=24),
    ],
    ids=["quantize", "vmap", "w8a8"],
)
def test_rows_to_be_padded_are_not_open(function):
    """Whether they are padded would not be known before the program runs."""
    (rows,) = export.symbolic_shape("rows")
    with pytest.raises(ShapeError, match=r"^(x|input) needs a fixed number of rows to be padded, got shape \(.*rows, "):
        exported(function, jax.ShapeDtypeStruct((rows, K), jnp.float32))


@pytest.mark.parametrize("rows", [None, 5])
def test_a_program_for_devices_that_are_not_here(rows):
    if any(handler.ALL[name].here for name in ("cuda", "rocm")):
        pytest.skip("is for machines without a GPU")
    m = export.symbolic_shape("rows")[0] if rows is None else rows
    w = weight()
    made = exported(
        _linear((PER_CHANNEL, PER_TOKEN)),
        jax.ShapeDtypeStruct((m, K), jnp.bfloat16),
        *w,
        platforms=("cpu", "cuda", "rocm"),
    )
    assert made.platforms == ("cpu", "cuda", "rocm")
    x = wide(5, K)
    assert same(made.call(x, *w), fp8core.linear(x, w))
    alone = exported(
        _linear((PER_CHANNEL, PER_TOKEN)), jax.ShapeDtypeStruct((m, K), jnp.bfloat16), *w, platforms=("cuda",)
    )
    with pytest.raises(ValueError, match="platform"):
        alone.call(x, *w)


@pytest.mark.parametrize("m", [1, 3, 16, 200, 1000])
@pytest.mark.parametrize(("n", "k"), [(N, K), (7, 33), (1024, 1000), (130, 128)])
def test_no_layer_of_the_host_needs_more(m, n, k):
    for groups in ((PER_CHANNEL, PER_TOKEN), (BLOCK_128, GROUP_128), (PER_TENSOR, PER_TENSOR)):
        x, w = wide(m, k), weight(groups[0], n, k)
        most = most_scratch("linear", {0: ("bfloat16", x.shape), 1: ("float8_e4m3fn", w.data.shape)}, (), "cpu")
        placed = [programs.Placed(str(a.dtype), a.shape, tuple(range(a.ndim))[::-1]) for a in (x, *w)]
        options = tuple(groups[1]), None, None, True, False, None, None
        problem = programs.Problem("linear", (*placed, None, None, None, None), options)
        assert programs.Prepared(problem, HOST).scratch_bytes <= most


@pytest.mark.parametrize("target", [H200, MI250], ids=str)
@pytest.mark.parametrize("each", [1, 8, 1000])
def test_no_sort_of_choices_needs_more(each, target):
    for experts, row_bytes in ((1, 8), (128, 2048), (1024, 65536)):
        most = most_scratch("moe_permute", {}, (experts, None), "cuda")
        problem = MoePermute(target, "int32", experts, each, row_bytes, 4, 16)
        assert all(counts_bytes(problem, tokens) <= most for tokens in (1, 257, 10**4, 10**6 + 1, 10**6 * 9))
        assert counts_bytes(problem, 10**6) > most // 2


def test_codes_need_none_on_the_host():
    codes = "float8_e4m3fn"
    assert most_scratch("scaled_mm", {0: (codes, (4, 32)), 1: (codes, (32, 8))}, (), "cpu") == 0
    assert most_scratch("scaled_mm", {0: (codes, (4, 32)), 1: (codes, (32, 8))}, (), "cuda") > 32 << 20


def test_a_weight_needs_the_same_in_either_orientation():
    codes = "float8_e4m3fn"
    for k, n in ((31, 999), (999, 31)):
        turned = most_scratch("scaled_mm", {0: (codes, (4, k)), 1: (codes, (k, n))}, (), "cuda")
        assert turned == most_scratch("scaled_mm_nt", {0: (codes, (4, k)), 1: (codes, (n, k))}, (), "cuda")
