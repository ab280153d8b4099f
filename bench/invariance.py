"""Measures the cost of batch invariance: times products without and with ``batch_invariant``.

    python -m bench.invariance [--json FILE] [--modes row block] [--shapes 4096x4096] [--m 1 16 64 256]

Operands, floors and graphs are those of `bench.decode`; the kernels are those that the table chooses. Before it is
timed, each product is checked against float64, and a row of the invariant product against the product of that row
alone, bit for bit.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from bench import decode, results, timing
from bench.errors import relative
from bench.needs import require_gpu
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import ScaledMm

SHAPES: Final = ("4096x4096", "8192x8192", "28672x4096")
ROWS: Final = (1, 16, 64, 256)


class Invariant(decode.Case):
    """A case whose rows must not depend on the batch."""

    def problem(self) -> ScaledMm:
        """Return the case as a problem for the table of kernels."""
        return super().problem()._replace(batch_invariant=True)


def product(case: decode.Case) -> tuple[str, decode.Call]:
    """Return the name and a call of the kernel that the table chooses for a case."""
    problem = case.problem()
    kernel = next(SCALED_MM.ranking(problem))
    return kernel.name, decode.launched(kernel.plan(problem))


def differs(case: Invariant, o: decode.Operands) -> bool:
    """Return whether the last row of a result differs from that row's product alone."""
    alone = o._replace(out=torch.full_like(o.out[-1:], torch.nan), a=o.a[-1:])
    if case.mode != "tensor":
        alone = alone._replace(scale_a=o.scale_a[-1:].contiguous())
    _, call = product(case._replace(m=1))
    return not torch.equal(call(alone).view(torch.int16), o.out[-1:].view(torch.int16))


def measure(case: decode.Case, replays: int) -> dict[str, Any]:
    """Return one record: the case, its floor, the kernels, and each product's time or error."""
    operands = case.operands()
    first, reference = operands[0], decode.want(case, operands[0])
    kernels: dict[str, str] = {}
    calls: dict[str, list[Callable[[], object]]] = {}
    wrong: dict[str, str] = {}
    for name, kind in (("free", case), ("invariant", Invariant(*case))):
        kernels[name], call = product(kind)
        first.out.fill_(float("nan"))
        error = relative(call(first), reference)
        if error > decode.FAR:
            wrong[name] = f"error {error:.1e}"
        elif isinstance(kind, Invariant) and differs(kind, first):
            wrong[name] = "a row alone has other bits"
        else:
            calls[name] = [partial(call, o) for o in operands]
    del reference
    times = timing.compare(calls, replays)
    return {
        "bench": "invariance",
        **case._asdict(),
        "floor_us": case.roofline.floor(),
        "kernels": kernels,
        "us": timing.fields(times),
        "wrong": wrong,
    }


def main() -> None:
    """Time the cases, print a table, and append JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one line a case to this file")
    parser.add_argument("--modes", nargs="+", choices=decode.MODES, default=["row", "block"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--m", nargs="+", type=int, default=ROWS)
    parser.add_argument("--replays", type=int, default=timing.REPLAYS)
    arguments = parser.parse_args()
    require_gpu(parser)
    table = Table("mode", "m x n x k", "floor us", "free", "us", "invariant", "us", title=torch.cuda.get_device_name())
    for shape in arguments.shapes:
        n, k = map(int, shape.split("x"))
        for mode in arguments.modes:
            for m in arguments.m:
                record = measure(decode.Case(mode, m, n, k), arguments.replays)
                results.append(arguments.json, record)
                cells = []
                for name, kernel in record["kernels"].items():
                    time = record["us"].get(name)
                    cells += [kernel, record["wrong"][name] if time is None else f"{time['median']:.2f}"]
                table.add_row(mode, f"{m}x{n}x{k}", f"{record['floor_us']:.2f}", *cells)
        torch.cuda.empty_cache()
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
