"""Times every layout of `sm90_decode_unaligned` for odd products, and judges the one that it chooses.

    python -m bench.unaligned_layouts [--json FILE] [--count 100] [--rows few|wide|many] [--sizes SIZES] [--seed 1]
    python -m bench.unaligned_layouts --judge FILE ... [--fit]

The layouts of a product are interleaved, and weights rotate over more memory than L2 holds. Layouts that are estimated
to take more than --within times as long as the cheapest are left out. More than 64 rows are timed beside `realigned`,
which has no layouts. --judge times nothing and needs no GPU: it prints how much slower than the fastest of a record
what is chosen is, by the N side of wgmma, or for more than 64 rows. --fit prints the costs
(`decode_unaligned_config.COSTS`) that the times give: those of least squares of the logarithms of estimate over time,
where layouts near the fastest of a product count most.
"""

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from statistics import geometric_mean, median
from typing import Final, NamedTuple

from bench import odd_products, results
from bench.choice_records import H200
from bench.needs import require_gpu
from bench.odd_cases import BLOCKS, CODES, FEW, GROUP, ROW, WIDE, Product, log_uniform
from bench.results import Record
from fp8core.kernels.gemm.args import Matmul
from fp8core.kernels.gemm.scales import in_groups
from fp8core.kernels.gemm.sm90 import decode_unaligned as kernel
from fp8core.kernels.gemm.sm90 import decode_unaligned_config as config_model
from fp8core.kernels.gemm.sm90 import decode_wide_config
from fp8core.kernels.gemm.sm90.decode_config import MOST_ROWS, DecodeConfig, width
from fp8core.kernels.gemm.sm90.residues import lacks_registers, phases_of
from fp8core.kernels.gemm.table import COPIES, SCALED_MM
from fp8core.problem import ScaledMm
from fp8core.runtime import device

ROWS: Final = {
    "few": (1, 3, 5, 8, 9, 12, 16, 20, 24, 32, 40, 50, FEW),
    "wide": (129, 138, 150, 161, 173, 180, 192, 200, 215, 230, 245, 256),
    "many": (65, 72, 80, 89, 96, 100, 112, 128, 130, 138, 160, 200, 256, 300, 400, 512),
}
OWN: Final = kernel.SM90_DECODE_UNALIGNED.name
SIZES: Final = {
    "small": ((200, 16384), (64, 16384), (2e4, 8e6)),
    "medium": ((300, 16384), (128, 16384), (3e5, 60e6)),
    "large": ((3000, 40000), (1000, 20000), (25e6, 180e6)),
}
"""The least and most n, k and bytes of weights that are drawn."""
NEAR: Final = 1.5
"""Layouts that take up to so many times as long as the fastest one are fitted to; they count by this ratio's cube."""
ERROR: Final = 0.08
"""Errors of a logarithm count by their square below this, and linearly above it."""


def drawn(count: int, seed: int, sizes: str, rows: str = "few") -> list[Product]:
    """Return random odd products, with as many of each number of rows; they are determined by the arguments.

    Small weights have results that are added to, and amax, too.
    """
    chance, found = random.Random(seed), list[Product]()
    of_n, of_k, of_bytes = SIZES[sizes]
    while len(found) < count:
        n, k = log_uniform(chance, *of_n), log_uniform(chance, *of_k)
        made = Product(
            ROWS[rows][len(found) % len(ROWS[rows])],
            n,
            k // 4 * 4 if chance.random() < 0.3 else k,
            *chance.choice((ROW, ROW, BLOCKS, BLOCKS, GROUP)),
            out=chance.choice((WIDE, WIDE, WIDE, CODES[0], "float32")),
            bias=chance.choice(("", "", "bfloat16")),
            address=chance.choice((16, 16, 1)),
        )
        if sizes == "small":
            beta = float(chance.random() < 0.25 and made.out not in CODES)
            made = made._replace(beta=beta, amax=chance.random() < 0.25)
        if made.odd and of_bytes[0] <= n * k <= of_bytes[1]:
            found.append(made)
    return found


def name(config: DecodeConfig) -> str:
    """Return the name of a layout in records."""
    tiles = "x".join(map(str, config_model.warpgroups(config)))
    panels = f" of {config.panels}" if config.panels > 1 else ""
    return f"{config.residues} {tiles} {config.ctas_per_sm} {config.split_k}{panels}"


def layouts(p: ScaledMm) -> dict[str, DecodeConfig]:
    """Return the layouts of a product by their names."""
    found = list(config_model.candidates(in_groups(p)))
    if MOST_ROWS < p.m <= decode_wide_config.MOST_ROWS:
        for residues in (1, 2) if phases_of(p.ldb) > 1 else (1,):
            wide = decode_wide_config.candidates(kernel.wide(in_groups(p), residues), p.target)
            found += [one for one in wide if not lacks_registers(config_model.panel_of(p, one.panels), one)]
    return {name(config): config for config in found}


def timed(p: ScaledMm, within: float) -> dict[str, Matmul]:
    """Return the plans of layouts that cost up to ``within`` times as much as the cheapest, by their names."""
    found = layouts(p)
    us = {at: kernel.us(p, config) for at, config in found.items()}
    most = within * min(us.values(), default=0.0)
    plans = {at: kernel.decode_unaligned(p, config) for at, config in found.items() if us[at] <= most}
    return plans if p.m <= MOST_ROWS or COPIES.refusal(p) is not None else {**plans, COPIES.name: COPIES.plan(p)}


def compiled(made: Product, within: float) -> None:
    """Compile the layouts of a product, in a process of its own: the compiled kernels are kept on the disk."""
    timed(made.problem(device.target(0)), within)


def measure(made: Product, within: float) -> Record:
    """Return the times of a product in its layouts."""
    p = made.problem(device.target(0))
    us = odd_products.times({at: (p, plan) for at, plan in timed(p, within).items()})
    return {
        "bench": "unaligned_layouts",
        **made._asdict(),
        "us": {at: round(median(times), 3) for at, times in us.items()},
    }


def read(files: Iterable[Path]) -> list[Record]:
    """Return the records of files."""
    lines = (line for file in files for line in file.read_text(encoding="utf-8").splitlines())
    return [record for record in map(json.loads, lines) if record["bench"] == "unaligned_layouts"]


def product_of(record: Record) -> Product:
    """Return the product of a record."""
    return Product(**{field: record[field] for field in Product._fields})


def losses(records: Iterable[Record]) -> Iterator[tuple[int, float]]:
    """Yield for each record N, or 0 for more than 64 rows, and the time of what is chosen by the least one.

    A product is left out if what is chosen was not timed.
    """
    for record in records:
        p, few = product_of(record).problem(H200), record["m"] <= MOST_ROWS
        row = OWN if few else next(row.name for row in SCALED_MM.ranking(p))
        chosen = record["us"].get(name(kernel.layout(p)) if row == OWN else row)
        if chosen is not None:
            yield width(p.m) if few else 0, chosen / min(record["us"].values())


def report(records: Iterable[Record]) -> Iterator[str]:
    """Yield a line for each N, and for more than 64 rows, with how much slower than the fastest the chosen ones are."""
    found = defaultdict[int, list[float]](list)
    for side, loss in losses(records):
        found[side].append(loss)
    for side, each in sorted(found.items()):
        yield summary(f"N {side}" if side else f"more than {MOST_ROWS} rows", sorted(each))


def summary(of: str, each: Sequence[float]) -> str:
    """Return a line about ratios of products, which are in ascending order."""
    mean, tenth = geometric_mean(each), each[len(each) * 9 // 10]
    return f"{of}: {len(each)} products, mean {mean:.3f}, nine of ten {tenth:.3f}, most {each[-1]:.3f}"


class Sample(NamedTuple):
    """The time of a layout of a product."""

    problem: ScaledMm
    config: DecodeConfig
    us: float
    weight: float
    """Of the logarithm of estimate over time."""


def samples_of(records: Iterable[Record], side: int) -> list[Sample]:
    """Return the times of layouts of an N side near the fastest one of each product.

    More than 64 rows count for the side of 64 alone: with them the others fitted fewer rows worse, and more no better.
    """
    found = []
    for record in records:
        us, p = record["us"], in_groups(product_of(record).problem(H200))
        if side == MOST_ROWS or (p.m <= MOST_ROWS and side <= width(p.m)):
            of_name, fastest = layouts(p), min(us.values())
            near = ((of_name[at], time, time / fastest) for at, time in us.items() if at in of_name)
            found += [
                Sample(p, config, time, ratio**-3)
                for config, time, ratio in near
                if ratio < NEAR and side_of(p, config) == side
            ]
    return found


def side_of(p: ScaledMm, config: DecodeConfig) -> int:
    """Return the N side of wgmma that a layout has."""
    return width(config_model.panel_of(p, config.panels).m)


def errors(samples: Iterable[Sample], costs: config_model.Costs) -> list[float]:
    """Return the weighted logarithms of estimate over time."""
    return [one.weight * math.log(config_model.us(one.problem, one.config, costs) / one.us) for one in samples]


def loss(samples: Iterable[Sample], costs: config_model.Costs) -> float:
    """Return what a fit makes least."""
    return sum(math.sqrt(1 + (error / ERROR) ** 2) - 1 for error in errors(samples, costs))


def fitted(records: Iterable[Record], side: int) -> config_model.Costs:
    """Return the costs of an N side that fit the times of records best; the search begins at those of the source."""
    from scipy.optimize import least_squares

    samples, before = samples_of(records, side), config_model.COSTS[side]
    found = least_squares(
        lambda numbers: errors(samples, filled(before, numbers)),
        flat(before),
        bounds=(0, math.inf),
        loss="soft_l1",
        f_scale=ERROR,
    )
    return filled(before, (round(float(number), 3) for number in found.x))


def flat(costs: config_model.Costs) -> list[float]:
    """Return the numbers of costs in their order."""
    return [number for field in costs for number in (field.values() if isinstance(field, dict) else (field,))]


def filled(costs: config_model.Costs, numbers: Iterable[float]) -> config_model.Costs:
    """Return costs with other numbers, in the order of `flat`."""
    each = iter(numbers)
    fields = ({of: next(each) for of in field} if isinstance(field, dict) else next(each) for field in costs)
    return config_model.Costs(*fields)


def main() -> None:
    """Time layouts, or judge the choice by the times of files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one line a product to this file")
    parser.add_argument("--count", type=int, default=100, help="how many products are drawn")
    parser.add_argument("--rows", choices=ROWS, default="few", help="up to 64, 129 to 256, or more than 64")
    parser.add_argument("--sizes", choices=SIZES, default="medium", help="of the weights that are drawn")
    parser.add_argument("--within", type=float, default=math.inf, metavar="FACTOR", help="time none that cost more")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="start no further product after so long")
    parser.add_argument("--judge", type=Path, nargs="+", metavar="FILE", help="files of such records, to time nothing")
    parser.add_argument("--fit", action="store_true", help="with --judge: print the costs that the times give")
    options = parser.parse_args()
    if options.judge:
        records = read(options.judge)
        print(*report(records), sep="\n")
        for side in config_model.COSTS if options.fit else ():
            print(side, fitted(records, side))
        return
    require_gpu(parser)
    end, cases = time.monotonic() + options.seconds, drawn(options.count, options.seed, options.sizes, options.rows)
    records = []
    with ProcessPoolExecutor(max(1, (cpu_count() or 2) - 1), get_context("spawn")) as pool:
        for made, ready in [(made, pool.submit(compiled, made, options.within)) for made in cases]:
            if time.monotonic() > end:
                break
            ready.result()
            record = measure(made, options.within)
            if record["us"]:  # a large weight of many rows has no layouts
                records.append(record)
                results.append(options.json, record)
        pool.shutdown(cancel_futures=True)
    print(*report(records), sep="\n")


if __name__ == "__main__":
    main()
