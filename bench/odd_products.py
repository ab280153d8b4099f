"""Times products of odd shapes and of the aligned shape next to each, with the kernels chosen without tuning.

    python -m bench.odd_products [--json FILE]

n and k of a neighbour are the next multiples of 16. The two are interleaved, and their weights rotate over more memory
than L2 holds.
"""

import argparse
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from bench import results
from bench.needs import require_gpu
from bench.roofline import Roofline
from fp8core import timing
from fp8core.kernels.gemm.args import Matmul
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.example_problems import example_product
from fp8core.problem import ITEMSIZE, Granularity, ScaledMm
from fp8core.runtime import device

STEP: Final = 16
ROW: Final[tuple[Granularity, Granularity]] = ("row", "row")
BLOCK: Final[tuple[Granularity, Granularity]] = ("group", "block")
GROUP: Final[tuple[Granularity, Granularity]] = ("group", "group")
WIDE: Final = "bfloat16"
CODES: Final = "float8_e4m3fn"
FEW: Final = (1, 7, 16, 32, 64)
MANY: Final = (100, 300, 2000)
HIGH_PRECISION: Final = (
    *((m, n, k, scales) for scales in (ROW, BLOCK) for n, k in ((5000, 4100), (5000, 4101)) for m in FEW),
    *((m, n, k, scales) for scales in (ROW, BLOCK) for n, k in ((8192, 8193), (28672, 4097)) for m in (16, 32, 64)),
    *((m, n, k, scales) for scales in (ROW, BLOCK) for n, k in ((12345, 4096), (5001, 16384)) for m in (1, 16, 32, 64)),
    *((m, n, k, GROUP) for n, k in ((5000, 4101), (12345, 4096)) for m in (1, 16, 64)),
    *((m, n, k, scales) for scales in (ROW, BLOCK, GROUP) for n, k in ((5000, 4101), (12345, 4096)) for m in MANY),
)
SHAPES: Final = (
    *((*shape, WIDE) for shape in HIGH_PRECISION),
    *(
        (m, n, k, scales, CODES)
        for scales in (ROW, BLOCK)
        for n, k in ((5000, 4101), (5001, 4096))
        for m in (1, 16, 64)
    ),
)
"""m, n, k, scales and the dtype of the result."""


def problem(m: int, n: int, k: int, scales: tuple[Granularity, Granularity], out: str = WIDE) -> ScaledMm:
    """Return the product of contiguous matrices that begin at multiples of 16 bytes."""
    row_bytes = n * ITEMSIZE[out]

    def alignment(*strides: int) -> int:
        return min(STEP, *(stride & -stride for stride in strides))

    return example_product(device.target(0), *scales, m=m, n=n, k=k)._replace(
        out=out,
        out_scale=out == CODES,
        prefetch_weight=True,
        alignment=alignment(k, row_bytes),
        codes_alignment=alignment(k),
        out_alignment=alignment(row_bytes),
    )


def chosen(p: ScaledMm) -> tuple[str, Matmul]:
    """Return the row that the table chooses, and its plan."""
    choice = SCALED_MM.choice(p)
    assert choice is not None
    return choice.kernel, SCALED_MM.planned(p, choice)


def times(pairs: dict[str, tuple[ScaledMm, Matmul]]) -> dict[str, float]:
    """Return the microseconds of each product, interleaved with the others."""
    operands = {name: timing.Operands(p, launch.scratch_bytes) for name, (p, launch) in pairs.items()}
    device.cupy().cuda.runtime.deviceSynchronize()  # they are filled on another stream
    watch, runs, calls = timing.Stopwatch(), {}, {}
    for name, made in operands.items():
        made.run(pairs[name][1], watch.stream.ptr, made.weights[0])
        calls[name] = timing.calls_of(made)
        runs[name] = timing.recorded(made, pairs[name][1], watch.stream, calls[name])
    found = timing.interleaved(runs, watch.elapsed)
    return {name: 1e3 * median(ms) / calls[name] for name, ms in found.items()}


def measure(m: int, n: int, k: int, scales: tuple[Granularity, Granularity], out: str = WIDE) -> dict[str, Any]:
    """Return one record: a shape and its neighbour, each with the chosen row and its time."""
    near = -(-n // STEP) * STEP, -(-k // STEP) * STEP
    problems = {"odd": problem(m, n, k, scales, out), "near": problem(m, *near, scales, out)}
    rows = {name: chosen(p) for name, p in problems.items()}
    us = times({name: (p, rows[name][1]) for name, p in problems.items()})
    return {
        "bench": "odd_products",
        "shape": f"{m}x{n}x{k}",
        "scales": " x ".join(scales),
        "out": out,
        "kernel": rows["odd"][0],
        "us": us["odd"],
        "neighbour": f"{m}x{near[0]}x{near[1]}",
        "neighbour_kernel": rows["near"][0],
        "neighbour_us": us["near"],
        "floor_us": Roofline(n * k + m * k + ITEMSIZE[out] * m * n).floor(),
    }


def main() -> None:
    """Time the shapes, print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one line a shape to this file")
    options = parser.parse_args()
    require_gpu(parser)
    table = Table(title=torch.cuda.get_device_name(0))
    for column in ("m x n x k", "scales", "out", "kernel", "us", "neighbour's", "its us", "ratio", "memory's us"):
        table.add_column(column, justify="right")
    for shape in SHAPES:
        r = measure(*shape)
        results.append(options.json, r)
        times = (
            f"{r['us']:.2f}",
            r["neighbour_kernel"],
            f"{r['neighbour_us']:.2f}",
            f"{r['us'] / r['neighbour_us']:.2f}",
        )
        table.add_row(r["shape"], r["scales"], r["out"], r["kernel"], *times, f"{r['floor_us']:.1f}")
    Console(width=165).print(table)


if __name__ == "__main__":
    main()
