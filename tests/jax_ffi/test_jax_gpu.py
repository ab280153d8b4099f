"""Programs of JAX on a GPU: the bits of CuPy's arrays, recordings that run without Python, kernels met while recording."""

import threading

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax import export  # noqa: E402 - after the skip

import fp8core  # noqa: E402
import fp8core.jax  # noqa: E402
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TOKEN, Quantized  # noqa: E402
from fp8core.interop.float8 import Float8Array  # noqa: E402
from fp8core.jax import handler, programs  # noqa: E402
from fp8core.jax.scratch import most_scratch  # noqa: E402
from fp8core.kernels.gemm.table import SCALED_MM  # noqa: E402
from jax_ffi.cases import BF16, CASES, GROUPS, K, N, same, stacked, weight, wide  # noqa: E402
from support.engines import CupyEngine  # noqa: E402

pytestmark = pytest.mark.gpu
LAYERS = 12
"""Calls of a program: XLA records five or more."""


@pytest.fixture(autouse=True)
def gpu():
    found = [there for there in jax.local_devices() if there.platform == "gpu"]
    if not found:
        pytest.skip("JAX has no GPU")
    return found[0]


@pytest.fixture
def launches(monkeypatch):
    """Count how often Python launches a call of a program."""
    counted = []
    launch = programs.Prepared.__call__

    def count(self, stream, addresses):
        counted.append(self)
        launch(self, stream, addresses)

    monkeypatch.setattr(programs.Prepared, "__call__", count)
    return counted


def on_host(x):
    if isinstance(x, tuple):
        return tuple(map(on_host, x))
    return x.get() if isinstance(x, Float8Array) or hasattr(x, "get") else np.asarray(x)


def chain(x, layers):
    for data, scale in layers:
        x = fp8core.linear(x, Quantized(data, scale, PER_CHANNEL))
    return x


def square(count=LAYERS):
    made = [fp8core.quantize(jnp.asarray(wide(K, K, seed=seed) / 16)) for seed in range(count)]
    return [tuple(one) for one in made]


def one_by_one(x, layers):
    for data, scale in layers:
        x = fp8core.linear(x, Quantized(data, scale, PER_CHANNEL))
    return np.asarray(x)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bits_of_cupys_arrays(case):
    cupy = CupyEngine()
    wanted = on_host(case.function(*map(cupy.array, case.inputs(16))))
    given = tuple(map(jnp.asarray, case.inputs(16)))
    assert same(jax.jit(case.function)(*given), wanted)
    assert same(case.function(*given), wanted)


def test_a_recorded_program_runs_without_python(launches):
    layers, program = square(), jax.jit(chain)
    inputs = [jnp.asarray(wide(16, K, seed=seed)) for seed in range(3)]
    wanted = [one_by_one(x, layers) for x in inputs]
    quiet = 0
    for _ in range(60):  # XLA records a program anew for other addresses of its results, of which there are a few
        launches.clear()
        for x, one in zip(inputs, wanted, strict=True):
            assert same(program(x, layers), one)
        quiet = 0 if launches else quiet + 1
        if quiet == 8:
            break
    assert quiet == 8


def test_kernels_that_are_met_while_a_program_is_recorded(launches):
    layers = square()
    x = jnp.asarray(wide(23, K))  # of rows that no other test has
    launches.clear()
    made = np.asarray(jax.jit(chain)(x, layers))
    assert len(launches) == LAYERS
    assert same(made, one_by_one(x, layers))


def test_weights_may_change_between_runs_of_a_program():
    program = jax.jit(chain)
    x = jnp.asarray(wide(16, K))
    first, second = square(), [tuple(jnp.copy(part) for part in one) for one in reversed(square())]
    for layers in (first, second) * 4:
        assert same(program(x, layers), one_by_one(x, layers))


def test_groups_may_end_elsewhere_in_each_run_of_a_program():
    """A recorded program reads the ends when it runs."""
    a, weights = jax.tree.map(jnp.asarray, (fp8core.quantize(wide(16, K)), [stacked() for _ in range(LAYERS)]))
    products = lambda a, weights, offs: [  # noqa: E731
        fp8core.grouped_scaled_mm_nt(a, w, scale_b=scale, offs=offs) for w, scale in weights
    ]
    program = jax.jit(products)
    for at in (*range(16), *range(16)):
        offs = jnp.asarray(np.linspace(at, 16, GROUPS).astype(np.int32))
        for made, wanted in zip(program(a, weights, offs), products(a, weights, offs), strict=True):
            assert same(made, np.asarray(wanted))


def test_a_residual_is_written_in_place_where_it_is_donated():
    def norm(x, w, residual):
        return fp8core.jax.rms_norm_quant(x, w, 1e-6, residual=residual)[1]

    x, residual = wide(5, K), wide(5, K, seed=3)
    given = jnp.array(residual)
    at = given.unsafe_buffer_pointer()
    total = jax.jit(norm, donate_argnums=2)(jnp.asarray(x), jnp.asarray(wide(K, seed=2)), given)
    assert total.unsafe_buffer_pointer() == at
    assert same(total, (x.astype(np.float32) + residual.astype(np.float32)).astype(BF16))


def test_threads_share_a_program():
    w, program = jax.tree.map(jnp.asarray, weight()), jax.jit(fp8core.linear)
    inputs = [jnp.asarray(wide(3, K, seed=seed)) for seed in range(8)]
    wanted = [np.asarray(program(x, w)) for x in inputs]
    wrong = []

    def run(i):
        for _ in range(50):
            if not same(program(inputs[i], w), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_vmap_and_grad_of_linear():
    w = jax.tree.map(jnp.asarray, weight())
    x = jnp.asarray(np.stack([wide(4, K, seed=seed) for seed in range(3)]))
    made = jax.jit(jax.vmap(lambda x: fp8core.linear(x, w, batch_invariant=True)))(x)
    for i in range(3):
        assert same(made[i], np.asarray(fp8core.linear(x[i], w, batch_invariant=True)))
    wide_x = x.astype(jnp.float32)
    grad = jax.jit(jax.grad(lambda x: fp8core.linear(x, w).sum()))(wide_x)
    wanted = np.broadcast_to(np.asarray(w.dequantize()).sum(0), grad.shape)
    np.testing.assert_allclose(grad, wanted, rtol=2e-2, atol=2e-2 * np.abs(wanted).max())


def test_beside_cupy(gpu):
    cupy = CupyEngine()
    x, w = wide(16, K), weight()
    theirs = Quantized(cupy.array(w.data), cupy.array(w.scale), w.group_shape)
    made = fp8core.linear(jnp.asarray(x), theirs)
    assert isinstance(made, jax.Array)
    assert made.devices() == {gpu}
    assert same(made, np.asarray(fp8core.linear(jnp.asarray(x), jax.tree.map(jnp.asarray, w))))


CHECKS = [export.DisabledSafetyCheck.custom_call("fp8core")]


def test_open_extents_in_a_recorded_program(launches):
    """Kernels for rows that an exported program meets are compiled while XLA records it."""
    layers = square()
    (rows,) = export.symbolic_shape("rows")
    shape = jax.ShapeDtypeStruct((rows, K), jnp.bfloat16)
    program = jax.jit(export.export(jax.jit(chain), disabled_checks=CHECKS)(shape, layers).call)
    for m in (1, 21, 300):
        x = jnp.asarray(wide(m, K))
        wanted = one_by_one(x, layers)
        launches.clear()
        assert same(program(x, layers), wanted)
        assert len(launches) == LAYERS
        quiet = 0
        for _ in range(60):
            launches.clear()
            assert same(program(x, layers), wanted)
            quiet = 0 if launches else quiet + 1
            if quiet == 4:
                break
        assert quiet == 4


@pytest.mark.parametrize(
    ("m", "n", "k", "keywords"),
    [
        (300, 520, 1040, {"bias": np.float32}),
        (70, 512, 1024, {"groups": (GROUP_128, BLOCK_128)}),
        (37, 333, 1001, {}),
        (40, 256, 512, {"out_dtype": "float8_e4m3fn", "out_scale": 0.5}),
    ],
)
def test_no_kernel_needs_more_scratch_than_open_extents_give(m, n, k, keywords):
    given = dict(keywords)
    of_a, of_weight = given.pop("groups", (PER_TOKEN, PER_CHANNEL))
    a = fp8core.quantize(jnp.asarray(wide(m, k)), group_shape=of_a, scale_layout="mn")
    w = fp8core.quantize(jnp.asarray(wide(n, k)), group_shape=of_weight)
    if "bias" in given:
        given["bias"] = jnp.ones(n, given["bias"])
    problem = fp8core.explain(fp8core.scaled_mm_nt, a, w, **given).problem
    codes = "float8_e4m3fn"
    most = most_scratch("scaled_mm_nt", {0: (codes, (m, k)), 1: (codes, (n, k))}, (), "cuda")
    able = {choice.kernel: choice for choice in reversed(SCALED_MM.candidates(problem))}
    with_scratch = {name: choice for name, choice in able.items() if name.startswith(("cublaslt", "realigned"))}
    needs = {name: SCALED_MM.planned(problem, choice).scratch_bytes for name, choice in with_scratch.items()}
    assert needs
    assert max(needs.values()) <= most, needs


def test_a_program_that_was_exported_without_a_gpu(monkeypatch):
    x, w = jnp.asarray(wide(6, K)), jax.tree.map(jnp.asarray, weight())
    with monkeypatch.context() as elsewhere:
        elsewhere.setitem(vars(handler.ALL["cuda"]), "here", False)
        made = export.export(jax.jit(fp8core.linear), disabled_checks=CHECKS, platforms=["cuda"])(x, w.data, w.scale)
    scratch = most_scratch("linear", {0: ("bfloat16", x.shape), 1: ("float8_e4m3fn", w.data.shape)}, (), "cuda")
    assert str(handler.scratch_extent(scratch)) in made.mlir_module()
    assert same(made.call(x, *w), np.asarray(fp8core.linear(x, w)))


@pytest.mark.multigpu
def test_two_devices():
    devices = jax.local_devices()[:2]
    mesh = jax.make_mesh((2,), ("d",), devices=devices)
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x, w = wide(16, K), weight()
    wanted = np.asarray(fp8core.linear(jnp.asarray(x[:8]), jax.tree.map(jnp.asarray, w)))
    program = jax.jit(fp8core.linear)
    made = program(jax.device_put(x, over), w)
    assert same(np.asarray(made)[:8], wanted)
    assert "all-gather" not in program.lower(jax.device_put(x, over), w).compile().as_text()
    far = jax.device_put(x, devices[1])
    assert fp8core.quantize(far).data.devices() == {devices[1]}
    assert same(fp8core.quantize(far).data, np.asarray(fp8core.quantize(x).data))
    assert made.shape[1] == N
