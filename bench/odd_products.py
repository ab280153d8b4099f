"""Times products of odd shapes beside the next aligned product, with the kernels chosen without tuning.

    python -m bench.odd_products [--json FILE] [--drawn 60] [--seed 0] [--plan]

A list of shapes comes first, then products whose shapes, addresses, scales and endings are drawn with a fixed seed. A
neighbour has the next multiples of 16 for n and k, aligned addresses, and the same ending; if that is more than a
bfloat16 result, the neighbour with a bfloat16 result, no beta and no amax is timed, too. All are interleaved, and
weights rotate over more memory than L2 holds. Whether results are right is checked by the tests, not here. --plan
prints which kernels are chosen, on any machine.
"""

import argparse
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench import log
from bench.needs import require_gpu
from bench.odd_cases import FEW, STEP, Product, drawn, listed
from bench.report.goals import ODD_PRODUCTS
from bench.results import Record, of_neighbour
from bench.roofline import Roofline
from fp8core import timing
from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.gemm.args import Matmul
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.explain import explain_product
from fp8core.problem import ScaledMm
from fp8core.runtime import device
from fp8core.target import Target

DRAWN: Final = 60


def planned(made: Product, target: Target) -> str:
    """Return the kernel that the table chooses without the device; no library is queried."""
    return next((kernel.name for kernel in SCALED_MM.ranking(made.problem(target))), "none")


def chosen(p: ScaledMm) -> tuple[str, Matmul]:
    """Return the row that the table chooses, and its plan."""
    choice = SCALED_MM.choice(p)
    assert choice is not None
    return choice.kernel, SCALED_MM.planned(p, choice)


def times(launches: dict[str, tuple[ScaledMm, Matmul]]) -> dict[str, list[float]]:
    """Return the microseconds of each product in each turn, interleaved with the others."""
    operands = {name: timing.Operands(p, launch.scratch_bytes) for name, (p, launch) in launches.items()}
    device.cupy().cuda.runtime.deviceSynchronize()  # they are filled on another stream
    watch, runs, calls = timing.Stopwatch(), {}, {}
    for name, made in operands.items():
        made.run(launches[name][1], watch.stream.ptr, made.weights[0])
        calls[name] = timing.calls_of(made)
        runs[name] = timing.recorded(made, launches[name][1], watch.stream, calls[name])
    found = timing.interleaved(runs, watch.elapsed)
    return {name: [1e3 * one / calls[name] for one in ms] for name, ms in found.items()}


def key(made: Product) -> dict[str, Any]:
    """Return the fields that distinguish a record from those of other products."""
    extents = {"m": made.m, "n": made.n, "k": made.k}
    return {"bench": "odd_products", "scales": made.scales, "ending": made.ending, **extents}


def measure(made: Product, target: Target) -> dict[str, Any]:
    """Return one record: a product and its neighbours, each with the chosen row and its time."""
    from bench.timing import fields, spread  # imports torch, which --plan does not need

    problems = {name: one.problem(target) for name, one in variants(made).items()}
    rows = {name: chosen(p) for name, p in problems.items()}
    us = times({name: (p, rows[name][1]) for name, p in problems.items()})
    p = problems["fp8core"]
    moved = p.n * p.k + p.m * p.k + (1 + (p.beta != 0)) * ITEMSIZE[p.out] * p.m * p.n
    return {
        **key(made),
        "neighbour": str(made.neighbour()),
        "kernels": {name: row for name, (row, _) in rows.items()},
        "floor_us": Roofline(moved, 2 * p.m * p.n * p.k).floor(),
        "us": fields({name: spread(each) for name, each in us.items()}),
    }


def variants(made: Product) -> dict[str, Product]:
    """Return a product and its neighbours, by their names in records."""
    near, plain = made.neighbour(), made.plain()
    return {"fp8core": made, "neighbour": near} | ({} if plain == near else {"plain": plain})


def summary(records: Sequence[Record]) -> Iterator[str]:
    """Yield for few and for many rows how many records exceed their goal, and the median and largest ratio."""
    for few, goal in ODD_PRODUCTS.items():
        ratios = [of_neighbour(r) for r in records if (r["m"] <= FEW) == few]
        if ratios:
            beyond = sum(found > goal for found in ratios)
            where = f"m <= {FEW}" if few else f"m > {FEW}"
            said = f"median {median(ratios):.2f}, most {max(ratios):.2f}"
            yield f"{where}: {beyond} of {len(ratios)} beyond {goal}, {said}"


def main() -> None:
    """Time the products, print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    log.options(parser)
    parser.add_argument("--drawn", type=int, default=DRAWN, metavar="COUNT", help="how many products are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-list", action="store_true", help="leave the list of shapes out")
    parser.add_argument("--plan", action="store_true", help="say which kernels are chosen on an H200, and time nothing")
    options = parser.parse_args()
    cases = (*(() if options.no_list else listed()), *drawn(options.drawn, options.seed))
    if options.plan:
        target = explain_product(1, STEP, STEP, target="sm_90").problem.target
        for made in cases:
            print(made, made.scales, made.ending, planned(made, target), sep="\t")
        return
    require_gpu(parser)
    records, table = [], Table(title=device.name(0))
    for column in ("m x n x k", "scales", "ending", "kernel", "us", "neighbour's", "its us", "ratio", "floor"):
        table.add_column(column, justify="right")
    for made, r in log.Log(options).measured(cases, key, lambda made: measure(made, device.target(0))):
        records.append(r)
        mine, near = (f"{r['us'][name]['median']:.2f}" for name in ("fp8core", "neighbour"))
        kernels = r["kernels"]
        numbers = (
            kernels["fp8core"],
            mine,
            kernels["neighbour"],
            near,
            f"{of_neighbour(r):.2f}",
            f"{r['floor_us']:.1f}",
        )
        table.add_row(str(made), made.scales, made.ending, *numbers)
    console = Console(width=180)
    console.print(table)
    for line in summary(records):
        console.print(line)


if __name__ == "__main__":
    main()
