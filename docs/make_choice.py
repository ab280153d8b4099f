"""Write the section of docs/how-to/tune.md on the cost of the choice without tuning, from docs/results/choice.

Run it without arguments to rewrite the section; with --check the exit status says whether it is current.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.choice_records import Record, gains_today, noise, part, read  # noqa: E402 - the repository is not installed
from bench.labels import PRODUCTS  # noqa: E402
from bench.report.tables import table  # noqa: E402
from bench.roofline import H100, H200  # noqa: E402

RUNS: Final = ROOT / "docs" / "results" / "choice"
PAGE: Final = ROOT / "docs" / "how-to" / "tune.md"
BEGIN, END = "<!-- the choice: begin -->\n", "<!-- the choice: end -->\n"
ROWS: Final = (1, 16), (17, 64), (65, 512), (513, 16384)
SAME: Final = 0.02
"""Differences up to this fraction are ignored."""
GPUS: Final = {H200: "an H200", H100: "an H100"}
BEGINNING: Final = """\
How much longer a product takes without tuning than with the fastest candidate. The products took no part in fitting
the choice: weights of other models and of random sizes, 1 to 16,384 rows.
"""
OF_GPU: Final = """\
**On {gpu}**, {number} products: for {share:.0%} of them tuning gains no more than {same:.0%}, the margin of `tune`. Two
times of one candidate in one run differ by {half:.1%} at the median, and for nine of ten candidates by no more than
{most:.1%}.
"""


def row(name: str, gained: list[float]) -> list[str]:
    """Return a line of the table."""
    far = f"{quantiles(gained, n=10)[-1]:.1%}"
    return [name, str(len(gained)), f"{median(gained):.1%}", far, f"{max(gained):.1%}"]


def of_gpu(blind: list[Record], gpu: str) -> Iterator[str]:
    """Yield the lines of the products that were timed on a model of GPU."""
    blind = [record for record in blind if record["device"] == gpu]
    pairs = list(gains_today(blind))

    def some(holds: Callable[[Record], bool]) -> list[float]:
        return [gained for record, gained in pairs if holds(record)]

    every = some(lambda _: True)
    apart = quantiles(noise(blind), n=10)
    share = sum(gained <= SAME for gained in every) / len(every)
    yield OF_GPU.format(gpu=GPUS[gpu], number=len(every), share=share, same=SAME, half=apart[4], most=apart[-1])
    lines = [row(f"scales {words}", some(lambda r, mode=mode: r["mode"] == mode)) for mode, words in PRODUCTS.items()]
    lines += [
        row(f"{least:,} to {most:,} rows", some(lambda r, least=least, most=most: least <= r["m"] <= most))
        for least, most in ROWS
    ]
    head = ["products", "number", "median", "90 % of them at most", "worst"]
    yield from (*table(head, [*lines, row("all", every)]), "")


def section(records: list[Record]) -> str:
    """Return the text between the markers."""
    blind = [record for record in records if part(record) == "judge"]
    how = [
        "```console",
        "$ python -m bench.choice --judge docs/results/choice/*.jsonl",
        "$ python docs/make_choice.py",
        "```",
    ]
    return "\n".join([BEGINNING, *(line for gpu in GPUS for line in of_gpu(blind, gpu)), *how]) + "\n"


def main() -> int:
    """Rewrite the section; with --check, return 1 if it would change."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = f"{before}{BEGIN}\n{section(read(sorted(RUNS.glob('*.jsonl'))))}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
