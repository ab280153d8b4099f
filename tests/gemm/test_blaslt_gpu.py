"""Every able row of the product on a GPU, against float64, launched as `ops` launches it."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import ITEMSIZE, ScaledMm
from fp8core.runtime import device

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy")
ml_dtypes = pytest.importorskip("ml_dtypes")

EXACT, FAST = 2.0e-3, 3.0e-3
"""Relative Frobenius error that the specification allows without and with fast accumulation."""
POISON = 0xA5


def e4m3():
    fnuz = device.target(0).platform == "hip" and device.target(0).arch == 0x942
    return "float8_e4m3fnuz" if fnuz else "float8_e4m3fn"


def decode(codes, name):
    table = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float64)
    return cp.asarray(table)[codes]


def codes(rng, rows, cols, ld, name):
    """Return random finite codes ``[rows, cols]`` in rows ``ld`` apart."""
    values = rng.standard_normal((rows, ld), np.float32) * 8
    return cp.asarray(values.astype(getattr(ml_dtypes, name)).view(np.uint8))[:, :cols]


def wide(storage, name):
    """Return 16-bit or fp32 storage as float64."""
    if name == "bfloat16":
        return (storage.view(cp.uint16).astype(cp.uint32) << 16).view(cp.float32).astype(cp.float64)
    return storage.view({"float16": cp.float16, "float32": cp.float32}[name]).astype(cp.float64)


def blocks(extent):
    return -(-extent // 128)


def spread(scale, rows, cols, m, k):
    """Return one scale an element of ``[m, k]`` from scales of ``rows`` x ``cols`` elements."""
    return cp.repeat(cp.repeat(scale, rows, 0), cols, 1)[:m, :k].astype(cp.float64)


def alignment(multiples):
    return next(size for size in (16, 8, 4, 2, 1) if all(x % size == 0 for x in multiples))


def case(
    mode_a="tensor",
    mode_b="tensor",
    m=64,
    n=512,
    k=1024,
    *,
    a=None,
    b=None,
    out="bfloat16",
    bias="",
    amax=False,
    fast=True,
    lda=None,
    ldb=None,
    ldo=None,
    layout="k",
    offset=0,
    negative=False,
    seed=0,
):
    """Return a problem with its operands on device 0; ``layout`` is that of 1x128 scales, ``offset`` shifts vectors."""
    rng = np.random.default_rng(seed)
    a, b = a or e4m3(), b or e4m3()
    lda, ldb, ldo = lda or k, ldb or k, ldo or n
    made = SimpleNamespace(offset=offset)
    made.a, made.b = codes(rng, m, k, lda, a), codes(rng, n, k, ldb, b)

    def scales(rows, cols, turned=False):
        values = rng.uniform(0.5, 1.5, (rows, cols)).astype(np.float32) * (-0.01 if negative else 0.01)
        store = cp.zeros(values.size + offset, cp.float32)[offset:]
        matrix = store.reshape(cols, rows).T if turned else store.reshape(rows, cols)
        matrix[...] = cp.asarray(values)
        return matrix

    shapes = {"tensor": (1, 1), "row": (m, 1), "group": (m, blocks(k))}
    made.scale_a = scales(*shapes[mode_a], turned=layout == "mn")
    shapes = {"tensor": (1, 1), "row": (n, 1), "group": (n, blocks(k)), "block": (blocks(n), blocks(k))}
    made.scale_b = scales(*shapes[mode_b], turned=mode_b == "group")
    sizes = {"tensor": (m, k), "row": (1, k), "group": (1, 128)}
    wide_a = spread(made.scale_a, *sizes[mode_a], m, k)
    sizes = {"tensor": (n, k), "row": (1, k), "group": (1, 128), "block": (128, 128)}
    wide_b = spread(made.scale_b, *sizes[mode_b], n, k)
    made.want = (decode(made.a, a) * wide_a) @ (decode(made.b, b) * wide_b).T
    made.bias = None
    if bias:
        values = rng.standard_normal(n).astype(np.float32)
        host = values.astype(ml_dtypes.bfloat16).view(np.uint16) if bias == "bfloat16" else values.astype(bias)
        made.bias = cp.zeros(n + offset, host.dtype)[offset:]
        made.bias[...] = cp.asarray(host)
        made.want += wide(made.bias, bias)
    made.value_amax = float(abs(made.want).max())
    made.out_scale = cp.float32(made.value_amax / 300) * cp.ones(1, cp.float32) if out.startswith("float8") else None
    made.amax = cp.full(1, 1e30, cp.float32) if amax else None
    made.storage = cp.full((m, ldo * ITEMSIZE[out]), POISON, cp.uint8)

    def strides(mode, matrix):
        rows, cols = (s // 4 for s in matrix.strides)
        return {"tensor": (0, 0), "row": (rows, 0)}.get(mode, (rows, cols))

    vectors = [address(x) for x in (made.scale_a, made.scale_b, made.bias, made.amax)]
    addresses = (made.a.data.ptr, made.b.data.ptr, made.storage.data.ptr, lda, ldb, ldo * ITEMSIZE[out])
    made.problem = ScaledMm(
        target=device.target(0),
        m=m,
        n=n,
        k=k,
        a=a,
        b=b,
        out=out,
        scale_a=mode_a,
        scale_b=mode_b,
        scale_a_strides=strides(mode_a, made.scale_a),
        scale_b_strides=strides(mode_b, made.scale_b),
        bias=bias,
        out_scale=made.out_scale is not None,
        amax=amax,
        use_fast_accum=fast,
        batch_invariant=False,
        lda=lda,
        ldb=ldb,
        ldo=ldo,
        alignment=alignment(addresses),
        vectors_alignment=alignment(vectors),
    )
    return made


def operands(made):
    return made.a, made.b, made.scale_a, made.scale_b


def replace(made, values):
    for to, value in zip(operands(made), values, strict=True):
        to[...] = value


def address(array):
    return array.data.ptr if array is not None else 0


def launch(made, plan, stream=0, scratch=None):
    scratch = cp.full(plan.scratch_bytes, POISON, cp.uint8) if scratch is None else scratch
    given = (*operands(made), made.bias, made.storage, made.out_scale, made.amax)
    plan(stream, *(address(x) for x in given), scratch.data.ptr if plan.scratch_bytes else 0)
    return scratch


def result(made):
    """Return the result as float64, having looked at what lies between its rows."""
    p = made.problem
    size = ITEMSIZE[p.out]
    assert (made.storage[:, p.n * size :] == POISON).all()
    inside = cp.ascontiguousarray(made.storage[:, : p.n * size])
    if p.out.startswith("float8"):
        return decode(inside, p.out) * float(made.out_scale[0])
    return wide(inside, p.out)


def error(got, want):
    return float(cp.linalg.norm(got - want) / cp.linalg.norm(want))


def able(made):
    return [
        v.kernel for v in SCALED_MM.explain(made.problem).verdicts if v.status in ("chosen", "able", "not preferred")
    ]


def check(made, row):
    kernel = next(k for k in SCALED_MM.kernels if k.name == row)
    made.storage[...] = POISON
    if made.amax is not None:
        made.amax[...] = 1e30
    launch(made, kernel.plan(made.problem))
    got = result(made)
    bound = FAST if made.problem.use_fast_accum else EXACT
    if made.problem.out.startswith("float8"):
        bound = 0.04  # half a step of three bits, spread evenly
    assert error(got, made.want) <= bound, row
    if made.amax is not None:
        assert abs(float(made.amax[0]) - made.value_amax) <= 2e-3 * made.value_amax, row
    return got


def check_all(made, *expected):
    rows = able(made)
    assert set(expected) <= set(rows), SCALED_MM.explain(made.problem)
    for row in rows:
        check(made, row)


ROWS_OF_A = (1, 3, 16, 64, 83, 512)
on_hopper = pytest.mark.skipif(
    not device.count() or device.target(0).arch != 90, reason="the library has these modes on sm_90 only"
)


@pytest.mark.parametrize("m", ROWS_OF_A)
@pytest.mark.parametrize("fast", [True, False])
def test_per_tensor(m, fast):
    check_all(case(m=m, fast=fast, seed=m), "generic_decode", "generic_mma")


@pytest.mark.parametrize("m", ROWS_OF_A)
@pytest.mark.parametrize("modes", [("row", "row"), ("tensor", "row"), ("row", "tensor")])
def test_per_row_and_mixes(m, modes):
    check_all(case(*modes, m=m, seed=m), "generic_decode", "generic_mma")


@on_hopper
@pytest.mark.parametrize("m", ROWS_OF_A)
@pytest.mark.parametrize("layout", ["k", "mn"])
@pytest.mark.parametrize("weight", ["block", "group"])
def test_blocks(m, layout, weight):
    ragged = ("cublaslt_pad_m", "cublaslt_split_m") if m > 4 else ()
    rows = ("cublaslt_relayout",) if m % 4 == 0 else ragged
    check_all(case("group", weight, m=m, layout=layout, seed=m, fast=False), "generic_decode", "generic_mma", *rows)


@on_hopper
@pytest.mark.parametrize("k", [1152, 1280, 1040, 144])
def test_blocks_of_any_number(k):
    check_all(case("group", "block", m=68, n=520, k=k, fast=False), "generic_decode", "generic_mma")


@on_hopper
@pytest.mark.parametrize("m", [5, 66, 255, 515])
@pytest.mark.parametrize(
    "options", [{}, {"offset": 1, "bias": "bfloat16"}, {"lda": 1040, "ldo": 520, "out": "float16"}]
)
@pytest.mark.parametrize("weight", ["block", "group"])
def test_blocks_of_rows_that_four_does_not_divide(m, options, weight):
    made = case("group", weight, m=m, layout="mn", seed=m, fast=False, **options)
    padded = ("cublaslt_pad_m",) if m <= 256 and not options else ()
    check_all(made, "cublaslt_split_m", *padded)
    made.problem = made.problem._replace(prefetch_weight=True)
    check_all(made, "cublaslt_split_m", *padded)


@on_hopper
def test_hopper_modes_are_offered():
    assert "cublaslt" in able(case())
    assert "cublaslt" in able(case("row", "row"))
    assert "cublaslt" in able(case("group", "block", layout="mn"))
    assert "cublaslt_epilogue" in able(case("row", "tensor"))


@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("modes", [("tensor", "tensor"), ("row", "row"), ("group", "block")])
@pytest.mark.parametrize("bias", ["", "same", "float32"])
def test_results_and_biases(out, modes, bias):
    check_all(
        case(*modes, m=20, out=out, bias=out if bias == "same" else bias, fast=False), "generic_decode", "generic_mma"
    )


@pytest.mark.parametrize("modes", [("tensor", "tensor"), ("row", "row"), ("row", "tensor")])
@pytest.mark.parametrize("bias", ["", "float32"])
def test_codes_out(modes, bias):
    made = case(*modes, m=48, out=e4m3(), bias=bias, amax=True, fast=False)
    check_all(made, "generic_decode", "generic_mma")
    rows = able(made)
    first = check(made, rows[0]).copy()
    for row in rows[1:]:
        assert float((check(made, row) != first).mean()) < 0.02, row


def test_codes_saturate():
    made = case(m=48, out=e4m3(), fast=False)
    made.out_scale /= 8
    largest = 448.0 if e4m3().endswith("fn") else 224.0
    for row in able(made):
        kernel = next(k for k in SCALED_MM.kernels if k.name == row)
        launch(made, kernel.plan(made.problem))
        values = result(made) / float(made.out_scale[0])
        assert float(abs(values).max()) == largest, row


def test_amax_of_wide_results():
    check_all(case("row", "row", m=40, amax=True, fast=False), "generic_decode", "generic_mma")


@pytest.mark.parametrize(("a", "b"), [("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float8_e4m3fn")])
@pytest.mark.skipif(e4m3().endswith("fnuz") if device.count() else False, reason="OCP formats")
def test_mixed_formats(a, b):
    check_all(case(m=32, a=a, b=b, fast=False), "generic_decode", "generic_mma")


@pytest.mark.parametrize("modes", [("tensor", "tensor"), ("row", "row"), ("group", "block")])
def test_rows_further_apart_than_they_are_long(modes):
    check_all(
        case(*modes, m=36, lda=1040, ldb=1056, ldo=520, bias="bfloat16", fast=False), "generic_decode", "generic_mma"
    )


@pytest.mark.parametrize("modes", [("tensor", "tensor"), ("row", "row"), ("group", "block")])
def test_vectors_at_odd_addresses(modes):
    rows = ("cublaslt_relayout",) if device.target(0).arch == 90 else ()
    check_all(
        case(*modes, m=36, bias="bfloat16", offset=1, fast=False, layout="mn"), "generic_decode", "generic_mma", *rows
    )


@pytest.mark.parametrize("modes", [("tensor", "tensor"), ("row", "row"), ("group", "block")])
def test_negative_scales(modes):
    made = case(*modes, m=36, fast=False, negative=True)
    check_all(made, "generic_decode", "generic_mma")


@pytest.mark.parametrize(("n", "k"), [(511, 1024), (508, 1024), (512, 1000), (512, 1001), (5, 7), (1, 1)])
@pytest.mark.parametrize("modes", [("tensor", "tensor"), ("row", "row"), ("group", "block")])
def test_ragged_shapes_run_somewhere(n, k, modes):
    check_all(case(*modes, m=13, n=n, k=k, fast=False), "generic_decode", "generic_mma")


SHARED = [("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("group", "block")]


@pytest.mark.parametrize("modes", SHARED)
def test_graph_replay_follows_its_inputs(modes):
    made, other = case(*modes, m=64, seed=1, fast=False), case(*modes, m=64, seed=2, fast=False)
    for row in able(made):
        kernel = next(k for k in SCALED_MM.kernels if k.name == row)
        plan = kernel.plan(made.problem)
        scratch = launch(made, plan)
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            cp.cuda.get_current_stream().synchronize()
            stream.begin_capture()
            launch(made, plan, stream.ptr, scratch)
            graph = stream.end_capture()
        kept = [x.copy() for x in operands(made)]
        replace(made, operands(other))
        made.storage[...] = POISON
        cp.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        assert error(result(made), other.want) <= EXACT, row
        replace(made, kept)


@pytest.mark.parametrize("modes", SHARED)
def test_threads_share_a_plan(modes):
    """Eight threads, a stream each: no descriptor's address reaches another thread's product."""
    cases = [case(*modes, m=64, seed=seed, fast=False) for seed in range(8)]
    for row in able(cases[0]):
        kernel = next(k for k in SCALED_MM.kernels if k.name == row)
        plan = kernel.plan(cases[0].problem)

        def work(made, plan=plan):
            stream = cp.cuda.Stream(non_blocking=True)
            with stream:
                scratch = cp.full(plan.scratch_bytes, POISON, cp.uint8)
                for _ in range(25):
                    launch(made, plan, stream.ptr, scratch)
            stream.synchronize()

        cp.cuda.runtime.deviceSynchronize()
        with ThreadPoolExecutor(len(cases)) as pool:
            list(pool.map(work, cases))
        for made in cases:
            assert error(result(made), made.want) <= EXACT, row


def test_library_is_called_from_a_thread_that_never_met_the_device():
    made = case("row", "row", fast=False)
    row = able(made)[0]
    plan = next(k for k in SCALED_MM.kernels if k.name == row).plan(made.problem)
    scratch = cp.full(plan.scratch_bytes, POISON, cp.uint8)
    cp.cuda.runtime.deviceSynchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch, made, plan, 0, scratch).result()
    cp.cuda.runtime.deviceSynchronize()
    assert error(result(made), made.want) <= EXACT


@pytest.mark.parametrize("modes", SHARED)
def test_stream_is_the_one_that_was_given(modes):
    """The product waits for work that only its own stream knows of."""
    made = case(*modes, m=64, fast=False)
    for row in able(made):
        plan = next(k for k in SCALED_MM.kernels if k.name == row).plan(made.problem)
        scratch = launch(made, plan)
        right = made.a.copy()
        cp.cuda.runtime.deviceSynchronize()
        made.a[...] = 0
        made.storage[...] = POISON
        slow = cp.zeros(64 << 20, cp.float32)
        cp.cuda.runtime.deviceSynchronize()
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            for _ in range(20):
                slow += 1
            made.a[...] = right
            launch(made, plan, stream.ptr, scratch)
        stream.synchronize()
        assert error(result(made), made.want) <= EXACT, row


@pytest.mark.multigpu
@pytest.mark.parametrize("modes", SHARED)
def test_device_that_is_not_current(modes):
    with device.on(1):
        made = case(*modes, m=64, fast=False)
        made.problem = made.problem._replace(target=device.target(1))
    for row in able(made):
        plan = next(k for k in SCALED_MM.kernels if k.name == row).plan(made.problem)
        with device.on(1):
            scratch = cp.full(plan.scratch_bytes, POISON, cp.uint8)
            made.storage[...] = POISON
            cp.cuda.runtime.deviceSynchronize()
            stream = cp.cuda.Stream(non_blocking=True)
        assert device.current() == 0
        launch(made, plan, stream.ptr, scratch)
        assert device.current() == 0
        with device.on(1):
            stream.synchronize()
            assert error(result(made), made.want) <= EXACT, row
