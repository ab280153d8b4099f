"""Write docs/performance/accuracy.md and its plot from the records of `python -m bench accuracy` in docs/results.

Run it without arguments to rewrite them; with --check the exit status says whether the page is current.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import results  # noqa: E402 - the repository is not installed
from bench.labels import BLOCK, DECODE, LIBRARY, PRODUCTS  # noqa: E402
from bench.pictures import accuracy, style  # noqa: E402
from bench.report import rules  # noqa: E402
from bench.report.tables import table  # noqa: E402
from bench.results import Record, Results  # noqa: E402

RUNS: Final = ROOT / "docs" / "results"
PAGE: Final = ROOT / "docs" / "performance" / "accuracy.md"
IMAGES: Final = ROOT / "docs" / "images"
DEEP: Final = 21504
"""From this k on, fast accumulation in a single chain has large errors."""
INTRO: Final = """This page shows the errors of products by kernel, scales, `use_fast_accum` and k.
[Numerics](../concepts/numerics.md) has the formulas.

Each number is the largest relative error over all measured numbers of rows (m), in the Frobenius norm and in
units of 1e-3. It is the error of the product alone, against float64 for the same FP8 codes and scales. Rounding an
exact result to bfloat16 gives {rounded:.2f}. With the quantization of both operands the error is {share}; the tables
at the end have both.

The data `random` are normal; in `outliers` 0.5 % of the columns of a are multiplied by 50, like outlier features of
language models."""
OBEYED: Final = """`use_fast_accum=True` allows a kernel to keep fewer bits while it accumulates; `False` forbids it.
Every kernel obeys the option, and none refuses it."""
ROWS: Final = (
    ("`sm90_decode`, `sm89_decode`", "tensor cores sum 128 elements of k, and these sums are added in fp32", ""),
    ("`sm90_tiled`, `generic_…`, scales along k", "the same", ""),
    (
        "`sm90_tiled`, `generic_mma`, scales per tensor or row",
        "one chain over all of k; in tiles that several blocks share, over the part of each, added in fp32",
        "sums of 128 elements of k, added in fp32",
    ),
    ("`gfx9_decode`, `hipblaslt…`", "matrix instructions accumulate in fp32; there is no faster mode", ""),
    (
        "`cublaslt`, `…_relayout` and `…_epilogue`, scales per tensor or row",
        "the library's fast mode: one chain over all of k",
        "its exact mode: other kernels",
    ),
    ("`cublaslt…`, scales along k", "exact, because the library has no fast mode there", ""),
    ("every other kernel", "fp32", ""),
)
"""Kernels, their accumulation with use_fast_accum, and without, if that is different."""


def accumulation() -> list[str]:
    """Return a table of each kernel's accumulation with and without use_fast_accum."""
    rows = [[name, fast, exact or "the same bits"] for name, fast, exact in ROWS]
    return table(["kernel", "`use_fast_accum=True`", "`False`"], rows, words=3)


def worst(records: Iterable[Record]) -> str:
    """Return the largest error of some records in units of 1e-3, or a dash if there are none."""
    errors = [r["error"] for r in records]
    return f"{1e3 * max(errors):.2f}" if errors else "-"


def by_depth(records: Sequence[Record], out: str) -> list[str]:
    """Return a table: lines for mode, data, kernel and use_fast_accum (equal lines merged), a column for each k."""
    some = [r for r in records if r["out"] == out and r["data"] in ("random", "outliers")]
    depths = sorted({r["k"] for r in some})
    lines: dict[tuple[str, ...], list[tuple[str, bool]]] = {}
    for mode in PRODUCTS:
        keys = {(r["data"], r["kernel"], r["fast"]): None for r in some if r["mode"] == mode}
        for data, kernel, fast in sorted(keys, key=lambda key: (key[0] != "random", key[1], not key[2])):
            own = [r for r in some if (r["mode"], r["data"], r["kernel"], r["fast"]) == (mode, data, kernel, fast)]
            cells = tuple(worst(r for r in own if r["k"] == k) for k in depths)
            lines.setdefault((PRODUCTS[mode], data, *cells), []).append((kernel, fast))
    rows = [[mode, data, named(kernels), *cells] for (mode, data, *cells), kernels in lines.items()]
    return table(["scales", "data", "kernels", *(f"{k:,}" for k in depths)], rows, words=3)


def named(kernels: Sequence[tuple[str, bool]]) -> str:
    """Return the names of kernels, each with its use_fast_accum if the other value has another error."""
    names = dict.fromkeys(kernel for kernel, _ in kernels)
    both = {True: "", False: ""} if len(kernels) == 2 * len(names) else {True: " fast", False: " exact"}
    told = {name: {fast for kernel, fast in kernels if kernel == name} for name in names}
    return ", ".join(f"`{name}`{'' if len(fasts) == 2 else both[next(iter(fasts))]}" for name, fasts in told.items())


def real(records: Sequence[Record]) -> list[str]:
    """Return a table of the layers of a real model, with the error of quantization; equal lines are merged."""
    some = [r for r in records if r["data"] not in ("random", "outliers") and r["out"] == "bfloat16"]
    lines: dict[tuple[str, ...], list[tuple[str, bool]]] = {}
    for r in some:
        errors = (f"{1e3 * r[name]:.2f}" for name in ("error", "whole"))
        case = f"`{r['data']}`", f"{r['m']}x{r['n']}x{r['k']}", PRODUCTS[r["mode"]], *errors
        lines.setdefault(case, []).append((r["kernel"], r["fast"]))
    rows = [[layer, shape, mode, named(kernels), *errors] for (layer, shape, mode, *errors), kernels in lines.items()]
    return table(["layer", "m x n x k", "scales", "kernels", "product alone", "with quantization"], rows, words=4)


def quantization(records: Sequence[Record]) -> list[str]:
    """Return a table of the error with the quantization of both operands, by data and mode."""
    rows = []
    for data in ("random", "outliers"):
        for mode in PRODUCTS:
            some = [r["whole"] for r in records if (r["data"], r["mode"]) == (data, mode)]
            if some:
                rows.append([data, PRODUCTS[mode], f"{1e3 * min(some):.1f}", f"{1e3 * max(some):.1f}"])
    return table(["data", "scales", "least", "most"], rows, words=2)


def claim(records: Sequence[Record]) -> str:
    """Return the summary of products with k from `DEEP` on."""
    half = [r for r in records if r["out"] == "bfloat16"]
    rows = [r for r in half if r["data"] == "random" and r["mode"] == "row"]
    deep = [r for r in rows if r["k"] >= DEEP]
    most = max(r["k"] for r in deep)

    def at(kernel: str, k: int) -> str:
        return worst(r for r in deep if (r["kernel"], r["fast"], r["k"]) == (kernel, True, k))

    summed = worst(r for r in half if r["kernel"] == DECODE or not r["fast"])
    ours, theirs = ([at(kernel, k) for k in (DEEP, most)] for kernel in (BLOCK, LIBRARY))
    return f"""Fast accumulation of many rows with scales per tensor or row is one chain over all of k, or over a
part of it where blocks share a tile, and loses accuracy as k grows. Per token x per channel the error of `sm90_tiled`
is {ours[0]}e-3 at k = {DEEP:,} and {ours[1]}e-3 at {most:,}, that of the library {theirs[0]}e-3 and {theirs[1]}e-3.
`sm90_decode`, for up to 64 rows, and every kernel with `use_fast_accum=False` have an error of at most {summed}e-3 at
every k. So pass `use_fast_accum=False` if k is that large and m above 64."""


def page(found: Results) -> str:
    """Return the text of the page."""
    records = found.accuracy
    half = [r for r in records if r["out"] == "bfloat16"]
    rounded = 1e3 * max(r["rounded"] for r in half)
    whole = [1e3 * r["whole"] for r in half]
    share = f"{min(whole):.0f} to {max(whole):.0f}"
    measured = f"Measured on one {found.device}, {found.machine['date']}, by `{found.machine['command']}`."
    lines = ["# Accuracy", "", "<!-- Written by docs/make_accuracy.py from docs/results. -->", ""]
    lines += [INTRO.format(rounded=rounded, share=share), "", measured, "", *claim(records).splitlines(), ""]
    lines += [
        "![Error by k](../images/accuracy.png)",
        "",
        "## How kernels accumulate",
        "",
        OBEYED,
        "",
        *accumulation(),
    ]
    told = (
        "Columns are k. `fast` and `exact` are with and without `use_fast_accum`; a kernel without either word has\n"
        "the same error with both."
    )
    lines += ["## bfloat16 results", "", told, "", *by_depth(records, "bfloat16")]
    lines += ["## float32 results", "", "These show only the error of accumulation.", "", *by_depth(records, "float32")]
    lines += ["## With the quantization of both operands", "", *quantization(half)]
    if any(r["data"] not in ("random", "outliers") for r in records):
        lines += [
            "## A real model",
            "",
            "Two layers of the demo's encoder with the inputs that its sentences give them.",
        ]
        lines += ["", *real(records)]
    lines += [
        "## Measure it again",
        "",
        "```console",
        "$ python -m bench accuracy",
        "$ python docs/make_accuracy.py",
        "```",
    ]
    return "\n".join(lines) + "\n"


def measured() -> Results | None:
    """Return the results of the latest run with accuracy records, or None."""
    files = sorted((*RUNS.glob("*.jsonl"), *RUNS.glob("accuracy/*.jsonl")))
    shown = rules.select(run for path in files for run in results.runs(path))
    own = [
        run._replace(parts=[part])
        for run in shown.runs
        for part in run.parts
        if any(results.kind_of(record) == "accuracy" for record in part.records)
    ]
    return results.collect(own) if own else None


def main() -> int:
    """Rewrite the page and the plot; with --check, return 1 if the page would change."""
    found = measured()
    if found is None:
        print("no records of accuracy in docs/results: run python -m bench accuracy on a GPU first", file=sys.stderr)
        return 1
    text = page(found)
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text and (IMAGES / "accuracy.png").exists()
        return int(not current)
    PAGE.write_text(text, encoding="utf-8")
    import matplotlib as mpl

    mpl.use("Agg")
    with mpl.rc_context(style.STYLE):
        accuracy.draw(found, IMAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
