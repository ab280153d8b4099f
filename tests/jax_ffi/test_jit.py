"""Every public function under jax.jit and eagerly: the bits of the host engine."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import fp8core  # noqa: E402 - after the skip
import fp8core.jax  # noqa: E402
from fp8core import GROUP_128, Quantized  # noqa: E402
from fp8core.errors import DTypeError, LayoutError, ShapeError  # noqa: E402
from fp8core.interop.versions import is_older  # noqa: E402
from fp8core.jax import calls  # noqa: E402
from jax_ffi.cases import CASES, K, N, choices, ends, same, stacked, weight, wide  # noqa: E402
from support import reference  # noqa: E402

ROWS = 1, 5, 16


@pytest.fixture
def cpu():
    """Run on JAX's CPU, also where there is a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bits_of_the_host(case):
    jitted = jax.jit(case.function)
    for m in ROWS:
        wanted = case.function(*case.inputs(m))
        given = tuple(map(jnp.asarray, case.inputs(m)))
        for made in (jitted(*given), case.function(*given), jitted(*case.inputs(m))):
            assert same(made, wanted)
            assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(made))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("scale", [2.0**-127, 1e-40, -(2.0**-149)])
def test_scales_below_the_normal_numbers(scale):
    """XLA's threads count subnormal numbers as zeros; zeros divided by such a scale were NaN."""
    x = np.array([[0.0, -0.0, 3e-37, 1.0]], np.float32)
    given = np.full((1, 1), scale, np.float32)
    codes = fp8core.quantize(np.array([[0.5, -448.0, 3.0, 0.0]], np.float32), scale=1.0).data

    def every(x, given, codes):
        product = fp8core.scaled_mm_nt(codes, codes, given, 2.0**100, out_dtype="float32")
        return fp8core.quantize(x, scale=given).data, fp8core.dequantize(codes, given, dtype="float32"), product

    wanted = every(x, given, codes)
    assert same(jax.jit(every)(x, given, codes), wanted)
    assert same(every(*map(jnp.asarray, (x, given, codes))), wanted)
    flushed = jax.jit(lambda x: jax.pure_callback(lambda x: x * np.float32(0.5), x, x))(np.float32(2.0**-126))
    assert np.asarray(flushed).tobytes() == bytes(4)  # the thread computes afterwards as it did before


@pytest.mark.usefixtures("cpu")
def test_three_axes_and_no_rows():
    w = weight()
    for shape in ((2, 3, K), (0, K), (2, 0, K), (K,)):
        x = wide(*shape)
        assert same(jax.jit(fp8core.linear)(x, w), fp8core.linear(x, w))
        assert same(tuple(jax.jit(fp8core.quantize)(x)), tuple(fp8core.quantize(x)))
    tokens, ids = fp8core.quantize(wide(0, K), group_shape=GROUP_128), choices(0)
    made, wanted = jax.jit(fp8core.moe_permute, static_argnums=2)(tokens, ids, 3), fp8core.moe_permute(tokens, ids, 3)
    assert same((*made.rows, made.offs, made.inverse), (*wanted.rows, wanted.offs, wanted.inverse))


@pytest.mark.usefixtures("cpu")
def test_a_pair_keeps_its_groups_through_jit():
    q = jax.jit(lambda x: fp8core.quantize(x, group_shape=GROUP_128))(wide(4, K))
    assert isinstance(q, Quantized)
    assert q.group_shape == GROUP_128
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)] == [".data", ".scale"]


@pytest.mark.usefixtures("cpu")
def test_a_residual_is_returned_and_written_in_place_where_it_is_donated():
    def norm(x, w, residual):
        q, total = fp8core.jax.rms_norm_quant(x, w, 1e-6, residual=residual)
        return tuple(q), total

    x, w, residual = wide(5, K), wide(K, seed=2), wide(5, K, seed=3)
    kept = residual.copy()
    q = fp8core.rms_norm_quant(x, w, 1e-6, residual=kept)
    for function, donated in ((norm, False), (jax.jit(norm), False), (jax.jit(norm, donate_argnums=2), True)):
        given = jnp.array(residual)
        at = given.unsafe_buffer_pointer()
        codes, total = function(jnp.asarray(x), jnp.asarray(w), given)
        assert same(codes, tuple(q))
        assert same(total, kept)
        assert given.is_deleted() == donated
        assert (total.unsafe_buffer_pointer() == at) == donated
        assert donated or same(given, residual)


@pytest.mark.usefixtures("cpu")
def test_an_amax_is_returned():
    a, w = fp8core.quantize(wide(5, K)), weight()
    amax = np.full(1, -1, np.float32)
    wanted = fp8core.scaled_mm_nt(a, w, amax=amax)
    a, w = jax.tree.map(jnp.asarray, (Quantized(*a), Quantized(*w)))
    for function in (
        fp8core.jax.scaled_mm_nt,
        lambda a, w: fp8core.jax.scaled_mm_nt(a.data, w.data, a.scale, w.scale),
        lambda a, w: fp8core.jax.scaled_mm(a, w.T),
        lambda a, w: fp8core.jax.scaled_mm(a.data, w.data.T, a.scale, w.scale.T),
    ):
        assert same(function(a, w), (wanted, amax))
        assert same(jax.jit(function)(a, w), (wanted, amax))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("donated", [False, True])
def test_what_beta_adds_to_is_returned(donated):
    a, w = fp8core.quantize(wide(5, K)), weight()
    wanted, amax = wide(5, N, seed=9).astype(np.float32), np.full(1, -1, np.float32)
    given = jnp.array(wanted)
    fp8core.scaled_mm_nt(a, w, amax=amax, beta=-0.5, activation="silu", out=wanted, out_dtype="float32")
    a, w = jax.tree.map(jnp.asarray, (Quantized(*a), Quantized(*w)))

    def added(a, w, out):
        return fp8core.jax.scaled_mm_nt(a, w, beta=-0.5, activation="silu", out=out, out_dtype="float32")

    assert same(added(a, w, given), (wanted, amax))
    assert same(jax.jit(added, donate_argnums=(2,) if donated else ())(a, w, given), (wanted, amax))
    assert given.is_deleted() == donated
    with pytest.raises(LayoutError, match=r"out needs .*: leave it out, or with beta take fp8core\.jax\.scaled_mm_nt,"):
        fp8core.scaled_mm_nt(a, w, beta=1.0, out=jnp.zeros((5, N), jnp.bfloat16))
    with pytest.raises(LayoutError, match=r"amax needs .*: take fp8core\.jax\.scaled_mm_nt, which returns it"):
        fp8core.scaled_mm_nt(a, w, amax=jnp.zeros(1))
    with pytest.raises(LayoutError, match=r"out needs to be writable, .* written to: leave it out$"):
        fp8core.linear(jnp.ones((5, K)), w, out=jnp.zeros((5, N)))
    with pytest.raises(LayoutError, match="beta needs out, whose values"):
        jax.jit(lambda a, w: fp8core.scaled_mm_nt(a, w, beta=1.0))(a, w)


@pytest.mark.usefixtures("cpu")
def test_layouts_meet_without_a_transposition():
    def product(x, w, layout):
        return fp8core.scaled_mm_nt(fp8core.quantize(x, group_shape=GROUP_128, scale_layout=layout), w)

    def grouped(x, w, scale):
        a = fp8core.quantize(x, group_shape=GROUP_128, scale_layout="mn")
        return fp8core.grouped_scaled_mm_nt(a, w, scale_b=scale, offs=ends(16, 16))

    def mixture(x, w, scale):
        q = fp8core.quantize(x, group_shape=GROUP_128, scale_layout="mn")
        rows, offs, inverse = fp8core.moe_permute(q, choices(16), len(w))
        return fp8core.moe_unpermute(fp8core.grouped_scaled_mm_nt(rows, w, scale_b=scale, offs=offs), inverse)

    def transposed(x, w):
        return fp8core.scaled_mm(fp8core.quantize(x), w.T)

    def moves(function, *args):
        text = jax.jit(function).lower(*args).compile().as_text()
        return text.count(" copy(") + text.count(" transpose(")

    x, blocks, channels = (jax.tree.map(jnp.asarray, one) for one in (wide(16, K), weight((128, 128)), weight()))
    assert moves(lambda x, w: product(x, w, "mn"), x, blocks) == 0
    assert moves(lambda x, w: product(x, w, "k"), x, blocks) == 1
    for group in ((128, 128), GROUP_128):
        assert moves(grouped, x, *stacked(group)) == moves(mixture, x, *stacked(group)) == 0
    copies = not is_older(jax.__version__, "0.11.1")  # XLA makes a copy for the CPU there, as docs/how-to/jax.md says
    assert moves(transposed, x, channels) == copies


@pytest.mark.usefixtures("cpu")
def test_a_grouped_product_is_that_of_each_group():
    """The ends are values of the device: one program for all. Rows after the last end are undefined."""
    q, (w, scale) = fp8core.quantize(wide(16, K)), stacked()
    a = jax.tree.map(jnp.asarray, q)
    program = jax.jit(lambda a, w, scale, offs: fp8core.grouped_scaled_mm_nt(a, w, scale_b=scale, offs=offs))
    for offs in ([16, 16, 16], [0, 9, 16], [-3, 4, 2], [20, 1, 5], [5, 6, 13]):
        of_numpy, made = np.array(offs, np.int32), program(a, w, scale, np.array(offs, np.int32))
        eager = fp8core.grouped_scaled_mm_nt(a, jnp.asarray(w), scale_b=jnp.asarray(scale), offs=of_numpy)
        begin = 0
        for group, end in enumerate(np.maximum.accumulate(np.clip(of_numpy, 0, 16)).tolist()):
            if end > begin:
                rows = slice(begin, end)
                wanted = fp8core.scaled_mm_nt(q.data[rows], w[group], q.scale[rows], scale[group])
                assert same(made[rows], wanted)
                assert same(eager[rows], wanted)
                exact = reference.scaled_mm(q.data[rows], w[group].T, q.scale[rows], scale[group].T)
                assert reference.relative_error(np.asarray(made[rows]), exact) <= 2**-8  # half an ulp of bfloat16
            begin = end
    assert program._cache_size() == 1


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("number", [2, 0.1])
def test_python_numbers_that_a_program_is_called_with_are_numbers(number, x64):
    x = wide(4, K)
    with jax.enable_x64(x64):
        by_tensor = lambda x, scale: fp8core.quantize(x, scale=scale, group_shape=(-1, -1))  # noqa: E731
        wanted, found = by_tensor(x, number), jax.jit(by_tensor)(jnp.asarray(x), number)
        assert found.scale.dtype == jnp.float32
        assert float(found.scale) == wanted.scale[0]
        assert np.array_equal(np.asarray(found.data).view(np.uint8), wanted.data.view(np.uint8))
        bounded = jax.jit(lambda x, bound: fp8core.quantize(x, scale_ub=bound))(jnp.asarray(x), number)
        assert np.array_equal(bounded.scale, fp8core.quantize(x, scale_ub=number).scale)
        with pytest.raises(DTypeError, match=r"scale needs an array of float32, .*, got bool"):
            jax.jit(by_tensor)(jnp.asarray(x), True)


@pytest.mark.usefixtures("cpu")
def test_chosen_experts_may_have_64_bits():
    x, ids = wide(6, K), choices(6)
    with jax.enable_x64(True):
        made = jax.jit(lambda x, ids: fp8core.moe_permute(x, ids, 3))(x, jnp.asarray(ids, jnp.int64))
        assert same(tuple(made), tuple(fp8core.moe_permute(x, ids, 3)))
        with pytest.raises(DTypeError, match="inverse needs int32, got int64"):
            jax.jit(fp8core.moe_unpermute)(made.rows, jnp.asarray(ids, jnp.int64))


@pytest.mark.usefixtures("cpu")
def test_jax_debug_nans_names_the_call():
    x = jnp.full((2, 64), jnp.inf)
    with jax.debug_nans(True):
        for call in (fp8core.quantize, jax.jit(fp8core.quantize)):
            with pytest.raises(FloatingPointError, match="in quantize"):
                call(x)


def test_calls_are_programs_where_jit_is_disabled():
    x = wide(9, K)
    for call in (fp8core.quantize, jax.jit(fp8core.quantize)):
        with jax.disable_jit():
            assert same(call(jnp.asarray(x)).data, fp8core.quantize(x).data)


def test_an_eager_call_is_described_once(monkeypatch):
    x = jnp.asarray(wide(7, K, dtype=np.float16))
    first = fp8core.quantize(x, group_shape=(1, 16))
    monkeypatch.setattr(calls, "traced", lambda *_: pytest.fail("described again"))
    assert same(tuple(fp8core.quantize(x + 0, group_shape=(1, 16))), tuple(first))


@pytest.mark.usefixtures("cpu")
def test_arrays_of_several_frameworks_go_their_own_way():
    x, w = wide(4, K), weight()
    y = fp8core.linear(jnp.asarray(x), w)
    assert isinstance(y, jax.Array)
    assert same(y, fp8core.linear(x, w))
    assert same(fp8core.quantize(jnp.asarray(x), stream=0).data, fp8core.quantize(x).data)


@pytest.mark.usefixtures("cpu")
def test_threads_share_a_program():
    from concurrent.futures import ThreadPoolExecutor

    w = weight()
    function = jax.jit(fp8core.linear)
    inputs = [wide(3, K, seed=seed) for seed in range(8)]
    wanted = [fp8core.linear(x, w) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        assert all(
            same(y, wanted[i % 8]) for i, y in enumerate(pool.map(lambda i: function(inputs[i % 8], w), range(160)))
        )


def test_symbolic_extents_are_those_of_results():
    export = pytest.importorskip("jax.export")
    rows, more = export.symbolic_shape("rows, more")
    x = jax.ShapeDtypeStruct((rows, more, K), jnp.bfloat16)
    q = jax.eval_shape(fp8core.quantize, x)
    assert (q.data.shape, q.scale.shape) == ((rows, more, K), (rows, more, 1))
    assert jax.eval_shape(fp8core.linear, x, weight()).shape == (rows, more, 256)
    with pytest.raises(ShapeError, match="quantize needs extents of results that are products of extents"):
        jax.eval_shape(
            lambda x: fp8core.quantize(x, group_shape=(128, 128)), jax.ShapeDtypeStruct((rows, K), jnp.float32)
        )
