"""Write the support matrix into README.md: which kernel each device would get, by the tables that calls use.

Run it bare to rewrite README.md, or with --check for an exit status that says whether README.md is current.
"""

import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

from fp8core.cli import TARGETS, UNPROVEN, proven, target_named
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.quantize import QUANTIZE
from fp8core.ops.explain import example_product, example_quantize
from fp8core.problem import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, Granularity, GroupShape, Target
from fp8core.table import Explanation, Table

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- support matrix: begin -->\n", "<!-- support matrix: end -->\n"
ELSEWHERE = 1 << 20
"""An ordinal that no machine has, so that the matrix is the same on all of them."""

MARK = "†"
FOOTNOTE = f"""`kernel`? runs if the vendor's library on the device offers an algorithm, which only the device can tell;
else the kernel after it does. {MARK} {UNPROVEN}."""

QUANTIZATIONS: tuple[tuple[str, GroupShape, bool], ...] = (
    ("static", PER_TENSOR, True),
    ("per tensor", PER_TENSOR, False),
    ("per token", PER_TOKEN, False),
    ("1x128", GROUP_128, False),
    ("128x128", BLOCK_128, False),
)
PRODUCTS: tuple[tuple[str, Granularity, Granularity], ...] = (
    ("tensor x tensor", "tensor", "tensor"),
    ("token x channel", "row", "row"),
    ("tensor x channel", "tensor", "row"),
    ("1x128 x 128x128", "group", "block"),
    ("1x128 x 1x128", "group", "group"),
)
TOKENS = (16, 256)
"""Rows of the products: a decoder's and a batch's."""


def cell(explanation: Explanation) -> str:
    """Return the kernel that runs a problem, after those that run it first if their library offers it."""
    before = list(takewhile(lambda v: v.status != "chosen", explanation.verdicts))
    possible = [f"`{v.kernel}`?" for v in before if v.status == "unknown"]
    return " ".join([*possible[:1], f"`{explanation.chosen}`"]) if explanation.chosen else "none"


def rows(columns: tuple[str, ...], cells: dict[str, list[str]]) -> list[str]:
    """Return a table in Markdown."""
    lines = [("device", *columns), ("---",) * (len(columns) + 1), *((name, *row) for name, row in cells.items())]
    return [f"| {' | '.join(line)} |" for line in lines]


def ask(table: Table[Any], problems: list[Any]) -> list[str]:
    """Return the cells of one device."""
    return [cell(table.explain(problem)) for problem in problems]


def targets() -> dict[str, Target]:
    """Return the devices of the matrix by their names."""
    found = {name: target_named(name)._replace(device=ELSEWHERE) for name in (*TARGETS, "host")}
    return {name if proven(target) else f"{name} {MARK}": target for name, target in found.items()}


def matrix() -> str:
    """Return the section between the two marks."""
    quantizations = {
        name: ask(QUANTIZE, [example_quantize(target, group, static=static) for _, group, static in QUANTIZATIONS])
        for name, target in targets().items()
    }
    lines = [
        "Quantization (4096 columns of bfloat16), by group:",
        "",
        *rows(tuple(name for name, *_ in QUANTIZATIONS), quantizations),
        "",
    ]
    for tokens in TOKENS:
        products = {
            name: ask(SCALED_MM, [example_product(target, a, b, m=tokens) for _, a, b in PRODUCTS])
            for name, target in targets().items()
        }
        lines += [
            f"Scaled products ({tokens} x 4096 x 4096, bfloat16 results), by the scales of a and b:",
            "",
            *rows(tuple(name for name, *_ in PRODUCTS), products),
            "",
        ]
    lines.append(FOOTNOTE)
    return "\n".join(lines) + "\n"


def main() -> int:
    """Rewrite README.md, or with --check tell whether it would change."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    current = f"{before}{BEGIN}{matrix()}{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(text != current)
    README.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
