"""Products on a GPU with random operands and their exact results, and launches of single kernels as in `ops`."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import ScaledMm
from fp8core.runtime import device
from support.products import EXACT, FAST
from support.sm90_products import decode, wide

cp = pytest.importorskip("cupy")

POISON = 0xA5


def e4m3():
    fnuz = device.target(0).platform == "hip" and device.target(0).arch == 0x942
    return "float8_e4m3fnuz" if fnuz else "float8_e4m3fn"


def codes(rng, rows, cols, ld, name):
    """Return random finite codes ``[rows, cols]`` with a row stride of ``ld``."""
    values = rng.standard_normal((rows, ld), np.float32) * 8
    return cp.asarray(values.astype(getattr(ml_dtypes, name)).view(np.uint8))[:, :cols]


def blocks(extent):
    return -(-extent // 128)


def spread(scale, rows, cols, m, k):
    """Return one scale for each element of ``[m, k]``, from scales for groups of ``rows`` x ``cols``."""
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
    offset_a=None,
    negative=False,
    seed=0,
):
    """Return a problem with operands on device 0; ``layout`` is that of 1x128 scales of a.

    ``offset`` is the number of elements by which scales and bias are shifted in memory; ``offset_a``, if given, is that
    of the scales of a.
    """
    rng = np.random.default_rng(seed)
    a, b = a or e4m3(), b or e4m3()
    lda, ldb, ldo = lda or k, ldb or k, ldo or n
    made = SimpleNamespace(offset=offset)
    made.a, made.b = codes(rng, m, k, lda, a), codes(rng, n, k, ldb, b)

    def scales(rows, cols, turned=False, offset=offset):
        values = rng.uniform(0.5, 1.5, (rows, cols)).astype(np.float32) * (-0.01 if negative else 0.01)
        store = cp.zeros(values.size + offset, cp.float32)[offset:]
        matrix = store.reshape(cols, rows).T if turned else store.reshape(rows, cols)
        matrix[...] = cp.asarray(values)
        return matrix

    shapes = {"tensor": (1, 1), "row": (m, 1), "group": (m, blocks(k))}
    made.scale_a = scales(*shapes[mode_a], turned=layout == "mn", offset=offset if offset_a is None else offset_a)
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
        scale_a_alignment=alignment(vectors[:1]),
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
    """Return the result as float64, after asserting that the memory between its rows was not written."""
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
    """Return the names of the kernels that can run a problem."""
    return [kernel.name for kernel in SCALED_MM.ranking(made.problem)]


def check(made, row):
    kernel = next(k for k in SCALED_MM.kernels if k.name == row)
    made.storage[...] = POISON
    if made.amax is not None:
        made.amax[...] = 1e30
    launch(made, kernel.plan(made.problem))
    got = result(made)
    bound = FAST if made.problem.use_fast_accum else EXACT
    if made.problem.out.startswith("float8"):
        bound = 0.04  # the rounding error of three mantissa bits: half a step at most, evenly distributed
    assert error(got, made.want) <= bound, row
    if made.amax is not None:
        assert abs(float(made.amax[0]) - made.value_amax) <= 2e-3 * made.value_amax, row
    return got


def check_all(made, *expected):
    rows = able(made)
    assert set(expected) <= set(rows), SCALED_MM.explain(made.problem)
    for row in rows:
        check(made, row)
