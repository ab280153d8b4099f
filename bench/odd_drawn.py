"""Times randomly drawn odd products and the next aligned product of each, with the kernels chosen without tuning.

    python -m bench.odd_drawn [--json FILE] [--count 60] [--seed 0] [--plan]

Shapes, scales and endings are drawn with a fixed seed. A neighbour has the next multiples of 16 for n and k, a
bfloat16 result, no beta and no amax. The two are interleaved, and their weights rotate over more memory than L2 holds.
--plan prints which kernels are chosen, on any machine.
"""

import argparse
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from bench import results
from bench.needs import require_gpu
from bench.odd_products import STEP, chosen, times
from bench.roofline import Roofline
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.explain import explain_product
from fp8core.problem import BLOCK, ITEMSIZE, Activation, Granularity, ScaledMm, Target

COUNT: Final = 60
FEW: Final = 64
"""Up to this many rows, a product is bound by reading its weight."""
MANY: Final = 4096
GOALS: Final = {True: 1.5, False: 2.5}
"""By whether a product has few rows: the largest acceptable ratio of its time to its neighbour's."""
MOST_OPERATIONS: Final = 4e11
MOST_BYTES: Final = 120e6
"""Products with more operations, or a weight of more bytes, are drawn again."""
MODES: Final[tuple[tuple[Granularity, Granularity], ...]] = (
    *(("tensor", "tensor"), ("tensor", "row"), ("row", "tensor"), ("row", "row")),
    *(("group", "block"), ("group", "group")),
)
"""The combinations of scales of a and b that products support."""
CODES: Final = ("float8_e4m3fn", "float8_e5m2")
OUTS: Final = ("bfloat16", "bfloat16", "bfloat16", "float16", "float32", *CODES)
ACTIVATIONS: Final[tuple[Activation, ...]] = ("", "", "", "gelu", "silu")


class Drawn(NamedTuple):
    """A product, without the device."""

    m: int
    n: int
    k: int
    scale_a: Granularity
    scale_b: Granularity
    a: str = CODES[0]
    b: str = CODES[0]
    out: str = "bfloat16"
    bias: str = ""
    activation: Activation = ""
    beta: float = 0.0
    amax: bool = False
    address: int = 16
    """The largest power of two, up to 16, that divides the addresses of a, b and out."""

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def odd(self) -> bool:
        """Whether it is not aligned, or has an ending that not all kernels support."""
        ends = self.beta != 0 or self.amax or self.out in CODES
        return bool(self.n % STEP or self.k % STEP or self.address < STEP or ends)

    @property
    def ending(self) -> str:
        """A short description of the product besides its shape and scales."""
        said = (
            self.out if self.out != "bfloat16" else "",
            f"bias {self.bias}" if self.bias else "",
            self.activation,
            "beta" if self.beta else "",
            "amax" if self.amax else "",
            "e5m2" if CODES[1] in (self.a, self.b) else "",
            f"@{self.address}" if self.address < STEP else "",
        )
        return " ".join(filter(None, said))

    def neighbour(self) -> "Drawn":
        """Return the next aligned product."""
        n, k = (math.ceil(extent / STEP) * STEP for extent in (self.n, self.k))
        scales = self.scale_a, self.scale_b
        return Drawn(self.m, n, k, *scales, self.a, self.b, bias=self.bias, activation=self.activation)

    def problem(self, target: Target) -> ScaledMm:
        """Return the product of contiguous matrices on a device."""
        blocks = math.ceil(self.k / BLOCK)
        strides_a = {"tensor": (0, 0), "row": (1, 0), "group": (1, self.m)}[self.scale_a]
        strides_b = {"tensor": (0, 0), "row": (1, 0), "group": (blocks, 1), "block": (blocks, 1)}[self.scale_b]
        codes_alignment = math.gcd(self.address, self.k)
        address = max(self.address, ITEMSIZE[self.out])
        out_alignment = math.gcd(address, self.n * ITEMSIZE[self.out])
        return ScaledMm(
            target=target,
            m=self.m,
            n=self.n,
            k=self.k,
            a=self.a,
            b=self.b,
            out=self.out,
            scale_a=self.scale_a,
            scale_b=self.scale_b,
            scale_a_strides=strides_a,
            scale_b_strides=strides_b,
            bias=self.bias,
            out_scale=self.out in CODES,
            amax=self.amax,
            use_fast_accum=True,
            batch_invariant=False,
            lda=self.k,
            ldb=self.k,
            ldo=self.n,
            alignment=min(codes_alignment, out_alignment),
            prefetch_weight=True,
            codes_alignment=codes_alignment,
            out_alignment=out_alignment,
            activation=self.activation,
            beta=self.beta,
        )


def _extent(chance: random.Random, least: float, most: float) -> int:
    """Return a log-uniformly distributed number; half of the numbers are rounded up to a multiple of `STEP`."""
    number = round(math.exp(chance.uniform(math.log(least), math.log(most))))
    return number if chance.random() < 0.5 else math.ceil(number / STEP) * STEP


def draws(seed: int) -> Iterator[Drawn]:
    """Yield an endless sequence of odd products that are not too large; it is determined by the seed."""
    chance = random.Random(seed)
    while True:
        least, most = (1, FEW) if chance.random() < 0.6 else (FEW, MANY)
        m = round(math.exp(chance.uniform(math.log(least), math.log(most))))
        n, k = _extent(chance, 200, 16384), _extent(chance, 64, 16384)
        made = Drawn(
            m,
            n,
            k,
            *chance.choice(MODES),
            b=CODES[chance.random() < 0.1],
            out=chance.choice(OUTS),
            bias=chance.choice(("", "", "bfloat16", "float32")),
            activation=chance.choice(ACTIVATIONS),
            beta=chance.choice((0.0, 0.0, 0.0, 1.0)),
            amax=chance.random() < 0.15,
            address=chance.choice((16, 16, 16, 8, 4, 1)),
        )
        if made.out in CODES:  # FP8 results do not support beta
            made = made._replace(beta=0.0)
        if made.odd and n * k <= MOST_BYTES and 2 * m * n * k <= MOST_OPERATIONS:
            yield made


def drawn(count: int = COUNT, seed: int = 0) -> tuple[Drawn, ...]:
    """Return the first products of a seed."""
    each = draws(seed)
    return tuple(next(each) for _ in range(count))


def planned(made: Drawn, target: Target) -> str:
    """Return the kernel that the table chooses without the device; no library is queried."""
    return next((kernel.name for kernel in SCALED_MM.ranking(made.problem(target))), "none")


def measure(made: Drawn, target: Target) -> dict[str, Any]:
    """Return one record: a product and its neighbour, each with the chosen row and its time."""
    both = {"odd": made.problem(target), "near": made.neighbour().problem(target)}
    rows = {name: chosen(p) for name, p in both.items()}
    us = times({name: (p, rows[name][1]) for name, p in both.items()})
    p = both["odd"]
    return {
        "bench": "odd_drawn",
        "shape": str(made),
        "scales": f"{made.scale_a} x {made.scale_b}",
        "ending": made.ending,
        "kernel": rows["odd"][0],
        "us": us["odd"],
        "neighbour": str(made.neighbour()),
        "neighbour_kernel": rows["near"][0],
        "neighbour_us": us["near"],
        "ratio": us["odd"] / us["near"],
        "few": made.m <= FEW,
        "floor_us": Roofline(p.n * p.k + p.m * p.k + (1 + (p.beta != 0)) * ITEMSIZE[p.out] * p.m * p.n).floor(),
    }


def summary(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yield for few and for many rows how many records exceed their goal, and the median and largest ratio."""
    for few, goal in GOALS.items():
        ratios = sorted(r["ratio"] for r in records if r["few"] == few)
        if ratios:
            beyond = sum(ratio > goal for ratio in ratios)
            where = f"m <= {FEW}" if few else f"m > {FEW}"
            said = f"median {ratios[len(ratios) // 2]:.2f}, most {ratios[-1]:.2f}"
            yield f"{where}: {beyond} of {len(ratios)} beyond {goal}, {said}"


def main() -> None:
    """Time the products, print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one line a product to this file")
    parser.add_argument("--count", type=int, default=COUNT, help="how many products are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", action="store_true", help="say which kernels are chosen on an H200, and time nothing")
    options = parser.parse_args()
    cases = drawn(options.count, options.seed)
    columns = ("m x n x k", "scales", "ending", "kernel", "us", "neighbour's", "its us", "ratio", "memory's us")
    if options.plan:
        target = explain_product(1, STEP, STEP, target="sm_90").problem.target
        for made in cases:
            print(made, f"{made.scale_a} x {made.scale_b}", made.ending, planned(made, target), sep="\t")
        return
    require_gpu(parser)
    from fp8core.runtime import device

    records, table = [], Table(title=device.name(0))
    for column in columns:
        table.add_column(column, justify="right")
    for made in cases:
        r = measure(made, device.target(0))
        results.append(options.json, r)
        records.append(r)
        numbers = (f"{r['us']:.2f}", r["neighbour_kernel"], f"{r['neighbour_us']:.2f}", f"{r['ratio']:.2f}")
        table.add_row(r["shape"], r["scales"], r["ending"], r["kernel"], *numbers, f"{r['floor_us']:.1f}")
    console = Console(width=180)
    console.print(table)
    for line in summary(records):
        console.print(line)


if __name__ == "__main__":
    main()
