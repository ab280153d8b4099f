"""Checks that a product has the same bits in every run, whatever other kernels have left in shared memory.

    python -m bench.repeats [--shapes MxNxK ...] [--scales A B] [--out DTYPE] [--address BYTES] [--kernel NAME]
                            [--runs 300] [--json FILE]

Codes are random, scales are 1. Before each run all shared memory is filled with 0x7E7E7E7E (8e37 as a scale, 448 as a
code), with NaN, or with zeros. Without --kernel, each kernel of fp8core that can run the product runs; with it, the
named kernel runs even if the table refuses it.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import results
from bench.needs import require_gpu
from bench.odd_cases import OUTS, Product
from fp8core import timing
from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.gemm.args import Matmul
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import ScaledMm
from fp8core.runtime import device
from fp8core.target import Target

SHAPES: Final = ((1, 4400, 11360), (5, 4400, 11360), (12, 4400, 11360), (1, 4400, 11361), (64, 4400, 11361))
"""m, n and k; a product with few rows and long k among them once had wrong results (experiments/2026-11-no-cliff)."""
RUNS: Final = 300
WORDS: Final = (0x7E7E7E7E, 0xFFFFFFFF, 0)
FILL: Final = """extern "C" __global__ void fill(unsigned word, int words) {
    extern __shared__ volatile unsigned memory[];
    for (int i = threadIdx.x; i < words; i += blockDim.x) {
        memory[i] = word;
    }
}
"""
THREADS: Final = 1024


class Repeats(NamedTuple):
    """The results of repeated runs of one product by one kernel."""

    counts: list[int]
    """How often each distinct result occurred, the most frequent first."""
    wrong: list[int]
    """For each other result: the number of elements that differ from the most frequent result."""


def kernels(p: ScaledMm) -> Iterator[str]:
    """Yield the kernels of fp8core that can run a product."""
    for kernel in SCALED_MM.kernels:
        if not kernel.name.startswith(("cublaslt", "hipblaslt")) and kernel.refusal(p) is None:
            yield kernel.name


def repeats(p: ScaledMm, kernel: str, runs: int = RUNS) -> Repeats:
    """Run a product repeatedly, and return how often each result occurred.

    Args:
        p: the product; its device has to be present.
        kernel: a row of the table, which may refuse the product.
        runs: the number of runs.
    """
    cupy = device.cupy()
    with device.on(p.target.device):
        plan = SCALED_MM.kernel(kernel).plan(p)
        operands, stream = timing.Operands(p, plan.scratch_bytes), cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()  # the operands are filled on another stream
        seen: Counter[bytes] = Counter()
        for word in islice(cycle(WORDS), runs):
            fill(stream, word)
            seen[_result(p, plan, operands, stream)] += 1
    found = [np.frombuffer(result, f"V{ITEMSIZE[p.out]}") for result, _ in seen.most_common()]
    return Repeats([count for _, count in seen.most_common()], [int((one != found[0]).sum()) for one in found[1:]])


def fill(stream: Any, word: int) -> None:
    """Fill the shared memory of all multiprocessors of CuPy's current device with a 32-bit word, on a stream."""
    cupy = device.cupy()
    attributes = cupy.cuda.Device().attributes
    size = attributes["MaxSharedMemoryPerBlockOptin"]  # so large that each multiprocessor runs one block
    kernel = cupy.RawKernel(FILL, "fill")
    kernel.max_dynamic_shared_size_bytes = size
    grid, given = (attributes["MultiProcessorCount"],), (np.uint32(word), np.int32(size // 4))
    with stream:
        kernel(grid, (THREADS,), given, shared_mem=size)


def _result(p: ScaledMm, plan: Matmul, operands: timing.Operands, stream: Any) -> bytes:
    """Return the bytes of a run's result; its memory is poisoned before the run."""
    cupy, nbytes, places = device.cupy(), p.m * p.ldo * ITEMSIZE[p.out], list[int]()

    def launch(stream: int, *given: int) -> None:
        places.append(given[5])
        cupy.cuda.runtime.memsetAsync(given[5], 0xA5, nbytes, stream)
        plan(stream, *given)

    operands.run(launch, stream.ptr, operands.weights[0])
    host = np.empty(nbytes, np.uint8)
    copied = host.ctypes.data, places[0], nbytes, cupy.cuda.runtime.memcpyDeviceToHost, stream.ptr
    cupy.cuda.runtime.memcpyAsync(*copied)
    stream.synchronize()
    return host.tobytes()


def measure(made: Product, target: Target, asked: str | None, runs: int) -> Iterator[dict[str, Any]]:
    """Yield one record per kernel."""
    p = made.problem(target)
    for kernel in kernels(p) if asked is None else (asked,):
        found = repeats(p, kernel, runs)
        yield {
            "bench": "repeats",
            "shape": str(made),
            "scales": made.scales,
            "ending": made.ending,
            "kernel": kernel,
            "runs": runs,
            "results": len(found.counts),
            "counts": found.counts[:16],
            "wrong": found.wrong[:16],
        }


def shape(text: str) -> tuple[int, int, int]:
    """Return the extents in a text ``MxNxK``."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"a shape is MxNxK, got {text}")
    m, n, k = (int(number) for number in found.groups())
    return m, n, k


def main() -> None:
    """Run the products, print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=shape, default=SHAPES, metavar="MxNxK")
    parser.add_argument("--scales", nargs=2, default=("group", "group"), metavar=("A", "B"), help="granularities")
    parser.add_argument("--out", default="float32", choices=sorted(set(OUTS)), help="the dtype of the results")
    parser.add_argument("--address", type=int, default=1, help="addresses of operands are multiples of it, up to 16")
    parser.add_argument("--kernel", help="a row of the table, which may refuse the products")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--json", type=Path, help="append one line a product and kernel to this file")
    options = parser.parse_args()
    require_gpu(parser, "cupy")
    table = Table(title=device.name(0))
    for column in ("m x n x k", "scales", "ending", "kernel", "runs", "results", "elements that differ"):
        table.add_column(column, justify="right")
    for extents in options.shapes:
        made = Product(*extents, *options.scales, out=options.out, address=options.address)
        for r in measure(made, device.target(0), options.kernel, options.runs):
            results.append(options.json, r)
            names = (r["shape"], r["scales"], r["ending"], r["kernel"])
            table.add_row(*names, str(r["runs"]), str(r["results"]), ", ".join(map(str, r["wrong"])) or "-")
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
