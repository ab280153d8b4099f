"""The host engine's scaled product and fused producers against float64."""

import itertools
from typing import Any

import numpy as np
import pytest

from fp8core import host
from fp8core.dtypes import FORMATS
from fp8core.host.product import multiply
from fp8core.problem import GroupShape, NormQuantize, ScaledMm, SiluQuantize
from fp8core.target import HOST
from support import reference
from support.host_launches import INPUTS, Poisoned, assert_same, quantize, row_stride, storage, strided
from support.launches import whole

MODES = [*itertools.product(("tensor", "row", "group"), ("tensor", "row", "group", "block"))]
SHAPES = [(1, 1, 1), (1, 300, 129), (5, 130, 1000), (130, 257, 640), (33, 17, 127), (3, 1100, 700)]
MIXED = [("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float8_e4m3fn"), ("float8_e4m3fnuz", "float8_e4m3fnuz")]


def blocks(count: int) -> int:
    return -(-count // 128)


def scales_for(rng: Any, granularity: str, rows: int, k: int, spread: float) -> np.ndarray:
    shape = {
        "tensor": (1, 1),
        "row": (rows, 1),
        "group": (rows, blocks(k)),
        "block": (blocks(rows), blocks(k)),
    }[granularity]
    return (rng.choice([-1, 1, 1], shape) * 10 ** rng.uniform(-spread, spread, shape)).astype(np.float32)


def each(scale: np.ndarray, granularity: str, rows: int, k: int) -> np.ndarray:
    """One scale an element."""
    shape = {"tensor": (-1, -1), "row": (1, -1), "group": (1, 128), "block": (128, 128)}[granularity]
    return reference.spread(scale, shape, (rows, k)).astype(np.float64)


def strides_of(scale: np.ndarray, granularity: str) -> tuple[int, int]:
    row, block = (stride // 4 for stride in scale.strides)
    return (0 if granularity == "tensor" else row, block if granularity in ("group", "block") else 0)


class Product:
    """Operands of a product, and what the host's plan makes of them."""

    def __init__(self, m, n, k, modes=("tensor", "tensor"), formats=("float8_e4m3fn", "float8_e4m3fn"), spread=1.0):
        rng = np.random.default_rng((m, n, k))
        self.shape, self.modes, self.formats = (m, n, k), modes, formats
        self.a, self.b = (
            strided(reference.encode(rng.standard_normal((rows, k)).astype(np.float32) * 4, dtype))
            for rows, dtype in zip((m, n), formats, strict=True)
        )
        self.scale_a = scales_for(rng, modes[0], m, k, spread)
        self.scale_b = scales_for(rng, modes[1], n, k, spread)
        self.bias = rng.standard_normal(n).astype(np.float32)

    def run(self, out="bfloat16", bias="", out_scale=None, amax=False, invariant=False, rows=slice(None)):
        _, n, k = self.shape
        a, scale_a = self.a[rows], self.scale_a if self.modes[0] == "tensor" else self.scale_a[rows]
        m = len(a)
        result = Poisoned(m, n, np.uint8 if out in FORMATS else storage(out))
        added = self.bias.astype(storage(bias or "float32"))
        factor, largest = np.array([out_scale or 1.0], np.float32), np.full(1, 7.5, np.float32)
        strides = (strides_of(scale_a, self.modes[0]), strides_of(self.scale_b, self.modes[1]))
        layout = (row_stride(a), row_stride(self.b), result.stride, 1)
        flags = (bias, out_scale is not None, amax, True, invariant)
        problem = ScaledMm(HOST, m, n, k, *self.formats, out, *self.modes, *strides, *flags, *layout)
        launch = host.plan_scaled_mm(problem)
        pointers = (a.ctypes.data, self.b.ctypes.data, scale_a.ctypes.data, self.scale_b.ctypes.data)
        after = (added.ctypes.data if bias else 0, result.pointer, factor.ctypes.data, largest.ctypes.data, 0)
        launch(0, *pointers, *after)
        return (result.result(), largest[0]) if amax else result.result()

    def want(self, bias: str = "") -> np.ndarray:
        m, n, k = self.shape
        a, b = (reference.decode(x, dtype) for x, dtype in zip((self.a, self.b), self.formats, strict=True))
        over = each(self.scale_a, self.modes[0], m, k), each(self.scale_b, self.modes[1], n, k).T
        added = self.bias.astype(storage(bias)) if bias else None
        return reference.scaled_mm(a, b.T, *over, added)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("modes", MODES)
def test_products_are_near_the_reference(modes, shape):
    product = Product(*shape, modes)
    for bias in ("", "float32", "bfloat16", "float16"):
        values = product.run("float32", bias)
        assert reference.relative_error(values, product.want(bias)) < 1e-6
        for out in ("bfloat16", "float16"):
            with np.errstate(over="ignore"):
                assert_same(product.run(out, bias), values.astype(storage(out)))


@pytest.mark.parametrize("formats", MIXED)
def test_product_of_formats(formats):
    product = Product(9, 40, 200, ("row", "row"), formats)
    assert reference.relative_error(product.run("float32"), product.want()) < 1e-6


def test_product_longer_than_a_tile():
    product = Product(1030, 1040, 520, ("row", "row"))
    assert reference.relative_error(product.run(), product.want()) < 2e-3
    product = Product(1030, 1040, 520, ("group", "block"))
    assert reference.relative_error(product.run(), product.want()) < 2e-3


@pytest.mark.parametrize("modes", MODES)
def test_scales_of_any_layout_and_size(modes):
    product = Product(6, 260, 700, modes, spread=12)
    want = product.want()
    assert reference.relative_error(product.run("float32"), want) < 1e-6
    product.scale_a, product.scale_b = np.asfortranarray(product.scale_a), np.asfortranarray(product.scale_b)
    assert reference.relative_error(product.run("float32"), want) < 1e-6


def test_tiny_block_scales():
    product = Product(4, 130, 256, ("group", "block"))
    product.scale_a, product.scale_b = product.scale_a * np.float32(1e-23), product.scale_b * np.float32(1e15)
    assert reference.relative_error(product.run("float32"), product.want()) < 1e-6


@pytest.mark.parametrize("modes", MODES)
def test_no_depth_gives_the_bias(modes):
    product = Product(3, 5, 0, modes)
    assert_same(product.run("float32"), np.zeros((3, 5), np.float32))
    assert_same(product.run("float32", "float32"), np.tile(product.bias, (3, 1)))


@pytest.mark.parametrize("shape", [(0, 5, 16), (5, 0, 16)])
def test_nothing_to_write(shape):
    got, amax = Product(*shape).run(amax=True)
    assert got.shape == shape[:2]
    assert amax == 0


@pytest.mark.parametrize("out", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_fp8_results(out):
    product = Product(20, 150, 300, ("row", "row"))
    values = product.run("float32", "float32")
    got, amax = product.run(out, "float32", out_scale=0.07, amax=True)
    assert_same(got, reference.encode(values * (np.float32(1) / np.float32(0.07)), out))
    assert amax == np.abs(values).max()


def test_amax_leaves_nan_out():
    product = Product(4, 4, 16)
    product.a[1, 3] = 0x7F
    got, amax = product.run("float32", amax=True)
    assert np.isnan(got[1]).all()
    assert amax == np.nanmax(np.abs(got))


@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")])
def test_a_row_has_the_same_bits_in_any_batch(modes):
    product = Product(150, 200, 700, modes)
    together = product.run("float32", invariant=True)
    for rows in (slice(0, 1), slice(70, 73), slice(149, 150), slice(3, 120)):
        assert_same(product.run("float32", invariant=True, rows=rows), together[rows])


class Scales:
    """Where a fused producer's scales lie."""

    def __init__(self, group_shape: GroupShape, rows: int, cols: int, static: bool) -> None:
        shape = group_shape.scale_shape(rows, cols)
        self.at = np.full(shape, 0.02 if static else 7.5, np.float32)
        self.operands = (self.at.ctypes.data, shape[1], 1)


FUSED = [((-1, -1), True), ((1, -1), False), ((1, 128), False), ((1, -1), True), ((3, 64), False)]


def assert_near(got: np.ndarray, scale: np.ndarray, values: np.ndarray, group_shape: GroupShape, static: bool) -> None:
    """Assert that codes and scales are those of ``values``, but for a code here and there that is one off."""
    given = scale if static else None
    wanted = reference.quantize(values.astype(np.float32), "float8_e4m3fn", group_shape, scale=given)
    np.testing.assert_allclose(scale, wanted.scale, rtol=1e-6)
    off = np.abs(got.astype(int) - wanted.codes)
    assert off.max() <= 1
    assert (off > 0).mean() < 2e-3


def through(x: np.ndarray, dtype: str, enabled: bool) -> np.ndarray:
    return x.astype(storage(dtype)).astype(np.float64) if enabled else x


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (0, 5, 7), (16, 512, 300), (512, 16, 300), (90, 90, 512), (1, 4096, 512), (700, 3, 512)],
)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_small_products_start_no_threads(m, n, k, one_by_one, monkeypatch):
    """OpenBLAS stays on one thread for what has at most 2**18 multiplications (interface/gemm.c)."""
    rng, sizes, matmul = np.random.default_rng((m, n, k)), [], np.matmul

    def counted(a, b, out):
        sizes.append(a.shape[0] * a.shape[1] * b.shape[1])
        return matmul(a, b, out=out)

    monkeypatch.setattr(np, "matmul", counted)
    left, right = (rng.standard_normal((rows, k), dtype=np.float32) for rows in (m, n))
    out = np.full((m, n), np.nan, np.float32)
    multiply(left, right, out, one_by_one)
    np.testing.assert_allclose(out, left.astype(np.float64) @ right.astype(np.float64).T, rtol=0, atol=1e-4)
    assert max(sizes, default=0) <= 1 << 18
    assert len(sizes) <= (2 * m * n * k >> 18) + 2 * (m if one_by_one else 1)


def test_large_products_are_left_to_the_blas(monkeypatch):
    sizes, matmul = [], np.matmul
    monkeypatch.setattr(np, "matmul", lambda a, b, out: sizes.append(a.shape) or matmul(a, b, out=out))
    left, right = np.ones((512, 128), np.float32), np.ones((512, 128), np.float32)
    out = multiply(left, right, np.full((512, 512), np.nan, np.float32), False)
    assert sizes == [(512, 128)]
    assert (out == 128).all()


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("group_shape", "static"), FUSED)
@pytest.mark.parametrize("source", INPUTS)
def test_norm_quantize_is_near_float64(source, group_shape, static, with_residual, between):
    rng, group_shape, (rows, cols) = np.random.default_rng(2), GroupShape(*group_shape), (210, 700)
    x, residual = (strided((rng.standard_normal((rows, cols)) * 3).astype(storage(source))) for _ in range(2))
    weight = rng.uniform(0.5, 2, cols).astype(storage(source))
    total = x.astype(np.float32)
    if with_residual:
        total, stored = reference.add(x, residual, rounded=between and static)
    root = np.sqrt((total.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    values = through(through(total / root, source, between) * weight.astype(np.float64), source, between)
    scales, data = Scales(group_shape, rows, cols, static), Poisoned(rows, cols, np.uint8)
    how = (static, "float32", "k", with_residual, between, cols, 1)
    launch = whole(host.plan_norm_quantize(NormQuantize(HOST, source, source, "float8_e4m3fn", group_shape, *how)))
    operands = (x.ctypes.data, row_stride(x), residual.ctypes.data, row_stride(residual), weight.ctypes.data, 1e-5)
    launch(0, *operands, data.pointer, data.stride, *scales.operands, rows, 0, float("inf"), 1e-10)
    assert_near(data.result(), scales.at, values, group_shape, static)
    if with_residual:
        assert_same(residual.copy(), stored)


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize(("group_shape", "static"), FUSED)
@pytest.mark.parametrize("source", INPUTS)
def test_silu_quantize_is_near_float64(source, group_shape, static, between):
    rng, group_shape, (rows, cols) = np.random.default_rng(3), GroupShape(*group_shape), (210, 350)
    x = strided((rng.standard_normal((rows, 2 * cols)) * 4).astype(storage(source)))
    activated = through(reference.silu(x[:, :cols]), source, between)
    values = through(activated * x[:, cols:].astype(np.float64), source, between)
    scales, data = Scales(group_shape, rows, cols, static), Poisoned(rows, cols, np.uint8)
    how = (static, "float32", "k", between, cols, 1)
    launch = whole(host.plan_silu_quantize(SiluQuantize(HOST, source, "float8_e4m3fn", group_shape, *how)))
    operands = (x.ctypes.data, row_stride(x), data.pointer, data.stride, *scales.operands)
    launch(0, *operands, rows, 0, float("inf"), 1e-10)
    assert_near(data.result(), scales.at, values, group_shape, static)


def test_fused_producers_quantize_as_quantize_does():
    gate = np.array([[-100.0, 0.0, 100.0, np.inf, -np.inf, np.nan, 1.0, -1.0]], np.float32)
    x = np.concatenate([gate, np.ones_like(gate)], axis=1)
    with np.errstate(all="ignore"):
        values = (gate / (np.float32(1) + np.exp(-gate))).astype(np.float32)
    data, scale = Poisoned(1, 8, np.uint8), np.full((1, 1), 7.5, np.float32)
    problem = SiluQuantize(HOST, "float32", "float8_e4m3fn", GroupShape(1, -1), False, "float32", "k", False, 8, 1)
    operands = (x.ctypes.data, 16, data.pointer, data.stride, scale.ctypes.data, 1, 1)
    whole(host.plan_silu_quantize(problem))(0, *operands, 1, 0, 448.0, 1e-10)
    want = quantize(values, scale_ub=448.0)
    assert_same(data.result(), want[0])
    assert_same(scale, want[1])
