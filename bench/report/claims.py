"""Summaries of results in one line: the titles of the plots, and sentences of the README."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from bench import results
from bench.labels import LIBRARY
from bench.results import Record, Results

FEW: Final = 64
"""The most rows that one launch of the decode kernel supports."""
SHOWN: Final = "Llama-8B"
"""The model whose decoder layer is described."""


def share(found: Sequence[float]) -> str:
    """Return a range of shares in whole percent, with both ends rounded down."""
    first, last = int(100 * min(found)), int(100 * max(found))
    return f"{first} %" if first == last else f"{first}–{last} %"


def quantize(found: Results) -> str:
    """Return the title of the plot of quantization."""
    heavy = results.large(found.quantize)
    rows = results.values(results.of_copy, [r for r in heavy if r["mode"] != "tensor"])
    tensor = results.values(results.of_copy, [r for r in heavy if r["mode"] == "tensor"])
    if not rows:
        return "Quantization beside a copy of as many bytes"
    twice = f", per tensor (it reads twice) at {share(tensor)}" if tensor else ""
    return f"From 100 MB on, quantization is at {share(rows)} of a copy's speed{twice}"


def fused(found: Results) -> str:
    """Return the title of the plot of the fused producers."""
    heavy = results.values(_of_floor, results.large(found.fused))
    if not heavy:
        return "Fused producers beside a copy of as many bytes"
    return f"From 100 MB on, fused producers move their bytes at {share(heavy)} of {found.memory}"


def _of_floor(record: Record) -> float | None:
    # A copy of these sizes is sometimes slow, depending on the addresses of its buffers.
    time = results.us(record, "fp8core")
    return None if time is None else float(record["floor_us"]) / time


def above_by_own(record: Record) -> float | None:
    """Return the microseconds of fp8core's kernel above the floor."""
    return _above(record, results.own_kernel(record))


def above_by_library(record: Record) -> float | None:
    """Return the microseconds of cuBLASLt above the floor."""
    return _above(record, results.us(record, LIBRARY))


def above_by_baseline(record: Record) -> float | None:
    """Return the microseconds of the best baseline above the floor."""
    best = results.best_baseline(record)
    return _above(record, None if best is None else best[0])


def _above(record: Record, time: float | None) -> float | None:
    return None if time is None else time - float(record["floor_us"])


def products(records: Sequence[Record]) -> str:
    """Return the summary of products with up to 16 rows: medians of the time above the floor."""
    few = [r for r in records if r["m"] <= 16]
    sides: list[tuple[str, Callable[[Record], float | None]]] = [
        ("fp8core kernel", above_by_own),
        ("best baseline", above_by_baseline),
        ("cuBLASLt", above_by_library),
    ]
    medians = [(name, results.values(of, few)) for name, of in sides]
    said = ", ".join(f"{name} {median(times):.1f}" for name, times in medians if times)
    counts = " and ".join(map(str, sorted({r["m"] for r in few})))
    return f"Products of {counts} rows, us above the floor (median): {said}"


def layer(found: Results) -> str:
    """Return the time of a decoder layer, with the baseline's time and the floor."""
    layers = sorted((r for r in found.layer if r["model"] == SHOWN), key=lambda r: r["m"])
    said = [(r, t) for r in layers if (t := results.us(r, "plain"))]
    if not said:
        return ""
    record, time = said[0]
    theirs = results.us(record, "vllm")
    beside = f", with vLLM's kernels {theirs:.0f} us" if theirs else ""
    floor = f"the floor is {record['floor_us']:.0f} us"
    return f"The linear path of a {SHOWN} layer takes {time:.0f} us at m = {record['m']}{beside}; {floor}"


def invariance(records: Sequence[Record]) -> str:
    """Return the cost of batch invariance."""
    pairs = [(r["m"], a, b) for r in records if (a := results.us(r, "free")) and (b := results.us(r, "invariant"))]
    more = [b - a for m, a, b in pairs if m <= FEW]
    times = [b / a for m, a, b in pairs if m > FEW]
    said = [f"Up to {FEW} rows that costs {min(more):+.1f} to {max(more):+.1f} us"] if more else []
    said += [f"more rows take {min(times):.1f} to {max(times):.1f} times as long"] if times else []
    return "; ".join(said)


def crossover(panels: Sequence[tuple[str, Sequence[Record]]]) -> str:
    """Return how often a kernel of fp8core is at least as fast as the library, where both can run."""
    both = [(a, b) for _, g in panels for r in g if (a := results.own_kernel(r)) and (b := results.us(r, LIBRARY))]
    faster = sum(a <= b for a, b in both)
    return f"A kernel of fp8core is as fast as cuBLASLt or faster at {faster} of {len(both)} measured points"


def against(found: Results) -> str:
    """Return the summary of the calls of two checkouts."""
    said = []
    for kind, name in (("gpu", "GPU times"), ("host", "host times")):
        ratios = [r["ratio"] for r in found.against if r["kind"] == kind and "ratio" in r]
        if ratios:
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            said.append(f"{name} are {median(ratios):.3f} of those before (median of {len(ratios)} calls; {spread})")
    text = "; ".join(said)
    return text[:1].upper() + text[1:]
