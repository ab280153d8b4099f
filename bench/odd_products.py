"""Products of odd shapes beside that of the aligned shape next to each, as the table chooses untuned.

    python -m bench.odd_products [--json FILE]

n and k of a neighbour are the next multiples of 16. Weights rotate over more memory than L2 holds.
"""

import argparse
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from bench import results
from bench.roofline import BANDWIDTH
from fp8core import timing
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.explain import example_product
from fp8core.problem import Granularity, ScaledMm
from fp8core.runtime import device

STEP: Final = 16
ROW: Final[tuple[Granularity, Granularity]] = ("row", "row")
BLOCK: Final[tuple[Granularity, Granularity]] = ("group", "block")
SHAPES: Final = (
    *((m, 5000, 4100, ROW) for m in (1, 7, 16, 32, 64, 100, 300)),
    *((m, 5000, 4101, ROW) for m in (1, 7, 16, 32, 64)),
    *((m, 12345, 4096, ROW) for m in (7, 64, 100, 2000)),
    *((m, 8192, 8193, ROW) for m in (16, 64)),
    *((m, 5001, 16384, ROW) for m in (16, 64)),
    *((m, 28672, 4097, ROW) for m in (16, 64)),
    *((m, 5000, 4100, BLOCK) for m in (7, 64)),
    *((2000, 4096, k, scales) for k in (4100, 4101) for scales in (ROW, BLOCK)),
)


def problem(m: int, n: int, k: int, scales: tuple[Granularity, Granularity]) -> ScaledMm:
    """Return the product of contiguous matrices that begin at multiples of 16 bytes."""

    def alignment(*strides: int) -> int:
        return min(STEP, *(stride & -stride for stride in strides))

    aligned = {"codes_alignment": alignment(k), "out_alignment": alignment(2 * n), "alignment": alignment(k, 2 * n)}
    return example_product(device.target(0), *scales, m=m, n=n, k=k)._replace(prefetch_weight=True, **aligned)


def time(p: ScaledMm) -> tuple[str, float]:
    """Return the row that the table chooses, and its microseconds."""
    choice = SCALED_MM.choice(p)
    assert choice is not None
    return choice.kernel, timing.times(p, [SCALED_MM.planned(p, choice)])[0]


def measure(m: int, n: int, k: int, scales: tuple[Granularity, Granularity]) -> dict[str, Any]:
    """Return one record: a shape and its neighbour, with the row that each is given and its time."""
    near = -(-n // STEP) * STEP, -(-k // STEP) * STEP
    (kernel, us), (other, other_us) = (time(problem(m, *size, scales)) for size in ((n, k), near))
    return {
        "bench": "odd_products",
        "shape": f"{m}x{n}x{k}",
        "scales": " x ".join(scales),
        "kernel": kernel,
        "us": us,
        "neighbour": f"{m}x{near[0]}x{near[1]}",
        "neighbour_kernel": other,
        "neighbour_us": other_us,
        "floor_us": (n * k + m * k + 2 * m * n) / BANDWIDTH * 1e6,
    }


def main() -> None:
    """Time the shapes, print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one line a shape to this file")
    chosen = parser.parse_args()
    table = Table(title=torch.cuda.get_device_name(0))
    for column in ("m x n x k", "scales", "kernel", "us", "neighbour's", "its us", "ratio", "memory's us"):
        table.add_column(column, justify="right")
    for shape in SHAPES:
        r = measure(*shape)
        results.append(chosen.json, r)
        times = (
            f"{r['us']:.2f}",
            r["neighbour_kernel"],
            f"{r['neighbour_us']:.2f}",
            f"{r['us'] / r['neighbour_us']:.2f}",
        )
        table.add_row(r["shape"], r["scales"], r["kernel"], *times, f"{r['floor_us']:.1f}")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
