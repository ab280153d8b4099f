"""Measures the rates of the host engine: million elements per second, on one core (products use BLAS's threads).

    python -m bench.engine [--rows N] [--cols N] [--json FILE]

The floor of a mode is a copy of as many bytes as it reads and writes, timed in the same run. Results are checked
against ml_dtypes before they are timed, and given by the caller, so that no allocation is timed.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

import fp8core
from bench import results
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, GroupShape

REPEATS: Final = 7
DTYPES: Final[dict[str, Any]] = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}
GROUPS: Final = {
    "per tensor": PER_TENSOR,
    "per token": PER_TOKEN,
    "per column": GroupShape(-1, 1),
    "1x128": GROUP_128,
    "128x128": BLOCK_128,
}
PRODUCTS: Final = ((1, 4096, 4096), (16, 4096, 4096), (512, 2048, 2048))


class Case(NamedTuple):
    """A mode, its call, the elements or operations that its rate counts, and the bytes that it moves."""

    name: str
    run: Callable[[], object]
    elements: int
    bytes_moved: int
    unit: str = "M elements/s"


def checked_codes(x: np.ndarray, data: np.ndarray, scale: np.ndarray, group: GroupShape, static: bool) -> None:
    """Assert that ``data`` equals the codes that ml_dtypes computes from x with ``scale``."""
    rows, cols = (count if span < 0 else span for span, count in zip(group, x.shape, strict=True))
    grid = scale.reshape(group.scale_shape(*x.shape))
    each = np.repeat(np.repeat(grid, rows, 0), cols, 1)[: x.shape[0], : x.shape[1]]
    wide = x.astype(np.float32)
    values = wide * (np.float32(1) / each) if static or group == PER_TENSOR else wide / each
    want = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert (want.view(np.uint8) == data.view(np.uint8)).all()


def quantizations(x: np.ndarray) -> Iterator[Case]:
    """Yield quantization in every mode, and dequantization to the dtype of x in every mode."""
    data, dtype = np.empty(x.shape, ml_dtypes.float8_e4m3fn), x.dtype.name
    moved = x.nbytes + data.nbytes
    one = np.full(1, 0.01, np.float32)
    fp8core.quantize(x, group_shape=PER_TENSOR, scale=one, out=data)
    checked_codes(x, data, one, PER_TENSOR, static=True)
    run = lambda: fp8core.quantize(x, group_shape=PER_TENSOR, scale=one, out=data)  # noqa: E731
    yield Case(f"quantize {dtype}, given scale", run, x.size, moved)
    for name, group in GROUPS.items():
        out = fp8core.quantize(x, group_shape=group)
        checked_codes(x, out.data, out.scale, group, static=False)
        run = lambda group=group, out=out: fp8core.quantize(x, group_shape=group, out=tuple(out))  # noqa: E731
        yield Case(f"quantize {dtype}, {name}", run, x.size, moved)
    result = np.empty_like(x)
    for name, group in GROUPS.items():
        q = fp8core.quantize(x, group_shape=group)
        how = {"group_shape": group, "dtype": dtype, "out": result}
        run = lambda q=q, how=how: fp8core.dequantize(q.data, q.scale, **how)  # noqa: E731
        yield Case(f"dequantize to {dtype}, {name}", run, x.size, moved)


def others(x: np.ndarray) -> Iterator[Case]:
    """Yield the fused producers and the operations on weights."""
    cols, dtype = x.shape[1], x.dtype.name
    weight, half = np.ones(cols, x.dtype), x[:, : cols // 2]
    out = fp8core.rms_norm_quant(x, weight, 1e-6)
    run = lambda: fp8core.rms_norm_quant(x, weight, 1e-6, out=tuple(out))  # noqa: E731
    yield Case(f"rms_norm_quant {dtype}, per token", run, x.size, x.nbytes + x.size)
    made = fp8core.silu_and_mul_quant(x, group_shape=GROUP_128)
    run = lambda: fp8core.silu_and_mul_quant(x, group_shape=GROUP_128, out=tuple(made))  # noqa: E731
    yield Case(f"silu_and_mul_quant {dtype}, 1x128", run, half.size, x.nbytes + half.size)
    codes, scales = out.data, np.array([0.01, 0.02, 0.03, 0.04], np.float32)
    widths, kept = [len(x) // 4] * 3 + [len(x) - len(x) // 4 * 3], np.empty_like(codes)
    run = lambda: fp8core.requantize_with_max_scale(codes, scales, widths, out=kept)  # noqa: E731
    yield Case("requantize_with_max_scale", run, x.size, 2 * x.size)
    fnuz = np.empty(codes.shape, ml_dtypes.float8_e4m3fnuz)
    run = lambda: fp8core.normalize_e4m3fn_to_e4m3fnuz(codes, scales, out=fnuz)  # noqa: E731
    yield Case("normalize_e4m3fn_to_e4m3fnuz", run, x.size, 2 * x.size)


def products() -> Iterator[Case]:
    """Yield products of few and of many rows."""
    rng = np.random.default_rng(1)
    for m, n, k in PRODUCTS:
        for group, of_weight in ((PER_TOKEN, PER_TOKEN), (GROUP_128, BLOCK_128)):
            a = fp8core.quantize(rng.standard_normal((m, k), np.float32), group_shape=group)
            b = fp8core.quantize(rng.standard_normal((n, k), np.float32), group_shape=of_weight)
            out = np.empty((m, n), ml_dtypes.bfloat16)
            run = lambda a=a, b=b, out=out: fp8core.scaled_mm_nt(a.data, b.data, a.scale, b.scale, out=out)  # noqa: E731
            name = f"scaled_mm {m}x{n}x{k}, {'per token' if group == PER_TOKEN else '1x128 by 128x128'}"
            yield Case(name, run, 2 * m * n * k, m * k + n * k + 2 * m * n, "GFLOP/s")


def seconds(run: Callable[[], object]) -> float:
    """Return the least time of several runs, the one that other processes disturb least."""
    least = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - start)
    return least


def copy_seconds(count: int) -> float:
    """Return the time of a copy that reads and writes ``count`` bytes in all."""
    source, target = np.ones(count // 2, np.uint8), np.empty(count // 2, np.uint8)
    return seconds(lambda: np.copyto(target, source))


def main() -> None:
    """Time the modes, print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="append one JSON object a mode to this file")
    chosen = parser.parse_args()
    table = Table("mode", "copy ms", "ms", "rate", "", title=f"host engine, {chosen.rows} x {chosen.cols}")
    for column in table.columns[1:4]:
        column.justify = "right"
    lines = []
    numbers = np.random.default_rng(0).standard_normal((chosen.rows, chosen.cols), np.float32)
    arrays = [numbers.astype(dtype) for dtype in DTYPES.values()]
    cases = (case for source in (*map(quantizations, arrays), others(arrays[0]), products()) for case in source)
    for case in cases:
        floor, spent = copy_seconds(case.bytes_moved), seconds(case.run)
        rate = case.elements / spent / (1e9 if case.unit == "GFLOP/s" else 1e6)
        table.add_row(case.name, f"{floor * 1e3:.2f}", f"{spent * 1e3:.2f}", f"{rate:.0f}", case.unit)
        lines.append(
            {"bench": "engine", "mode": case.name, "copy_s": floor, "s": spent, "rate": rate, "unit": case.unit}
        )
    Console().print(table)
    results.append(chosen.json, *lines)


if __name__ == "__main__":
    main()
