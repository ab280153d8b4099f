"""Records of what many products took by each candidate: read, judged, and told."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

from bench.choice_cases import BLIND, MODES, MOST_ROWS, Case
from fp8core.kernels.encodings import round_up
from fp8core.kernels.gemm import corrections
from fp8core.kernels.gemm.blaslt import ordering
from fp8core.kernels.gemm.blaslt.corrections import corrected_us
from fp8core.kernels.gemm.blaslt.mapping import FOUR
from fp8core.kernels.gemm.blaslt.rows import RELAYOUT_US, between_sectors
from fp8core.kernels.gemm.fallback_cost import pad_m_us
from fp8core.kernels.gemm.sm90 import decode_cost, tiled_choice, tiled_cost
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import ScaledMm, Target
from fp8core.table import Kernel, Table

Record = dict[str, Any]
MEASURED: Final = "NVIDIA H200"
"""The model of GPU that the constants are fitted to."""
H200: Final = Target("cuda", 90, 0, 132, 32, 227 << 10)
MEDIAN_GOAL, WORST_GOAL = 0.03, 0.10
"""What tuning may gain: at the median and at worst."""
CLOSE: Final = 1.6
"""Candidates that take this many times the least at first sight are not timed closer."""
PARTS: Final = "fit", "judge"


class Change(NamedTuple):
    """Since when a kernel of this library takes the time that it takes."""

    kernel: str
    since: str
    mode: str = ""
    """Of scales, if it was one alone."""
    up_to: int = MOST_ROWS
    """Rows."""
    odd: bool = False
    """Whether it was of results alone whose rows are not multiples of `PIECE` bytes."""


CHANGED: Final = (
    Change("sm90_tiled", "2026-11-22T22:10"),
    Change("sm90_tiled", "2026-11-23T07:30", "block", 64),
    Change("sm90_tiled", "2026-11-23T21:20", odd=True),
    Change("sm90_decode", "2026-11-23T01:20"),
    Change("realigned", "2026-11-24T00:00"),
    Change("realigned", "2026-11-26T22:30", odd=True),
    Change("sm90_decode_unaligned", "2026-11-24T00:00"),
)
"""Who makes a kernel faster or slower writes the time of the first run with it here: what was measured of it before
counts no more."""


def read(files: Iterable[Path]) -> list[Record]:
    """Return the records of files; of two about one product, GPU and the same kernels the later one."""
    return latest(every(files))


def latest(records: Iterable[Record]) -> list[Record]:
    """Return records without those of which a later one is about the same."""
    return list({(one["device"], *key(one), *one.get("only", ())): one for one in records}.values())


def every(files: Iterable[Path]) -> Iterator[Record]:
    """Give the records of files, each with the name of its file and what its machine was."""
    for file in files:
        machine: Record = {}
        for record in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if record["bench"] == "machine":
                machine = {name: record[name] for name in ("device", "multiprocessors", "started")}
            elif record["bench"] == "choice":
                yield {**record, **machine, "file": file.stem}


def key(record: Record) -> tuple[str | int, ...]:
    """Return what product a record is of."""
    return tuple(record[name] for name in Case._fields)


def part(record: Record) -> str:
    """Return what a record is for: "judge", of the blind half of a list, or "fit"."""
    return "judge" if record.get("list") in BLIND and record["half"] == "judge" else "fit"


def whole(record: Record) -> bool:
    """Return whether all kernels were timed, as far as they are not hopeless."""
    return not record.get("only") and record.get("list") != "odd"


def gain(us: Sequence[Sequence[float]], chosen: int | None) -> float:
    """Return how much slower the chosen one is than what tuning by one half of the turns finds, by the other half.

    None is one that was too slow at first sight to be timed.
    """
    found = []
    for known, judged in ((0, 1), (1, 0)):
        best = min(range(len(us)), key=lambda i: us[i][known])
        found.append(us[chosen][judged] / us[best][judged] if chosen is not None else CLOSE)
    return sum(found) / 2 - 1


def gains(records: Iterable[Record]) -> Iterator[tuple[Record, float]]:
    """Give each record and what tuning gains, as measured: the choice is the one of the time of the measurement."""
    for record in filter(whole, records):
        names = [[row["kernel"], row["algorithm"]] for row in record["rows"]]
        if record["first"] in names:
            yield record, gain([row["us"] for row in record["rows"]], names.index(record["first"]))


def gains_today(records: Iterable[Record]) -> Iterator[tuple[Record, float]]:
    """Give each record and what tuning gains, if the table chose as this checkout does: on any machine."""
    for gpu, of_gpu in groupby(map(still, filter(whole, records)), key=lambda record: str(record["device"])):
        with on(gpu):  # which forgets all estimates, and so not for each record
            made = [(record, chosen_today(record)) for record in of_gpu if record["rows"]]
        for record, chosen in made:
            if chosen is not None and (chosen.row is not None or [chosen.kernel, chosen.name] in record.get("far", ())):
                yield record, gain([row["us"] for row in record["rows"]], chosen.row)


def problem_of(record: Record) -> ScaledMm:
    """Return the product that a record is of, where it was measured."""
    return problem(Case(*key(record)), H200._replace(multiprocessors=record["multiprocessors"]))  # type: ignore[arg-type]


@cache
def problem(case: Case, target: Target) -> ScaledMm:
    """Return `Case.problem`, which asks the whole table, once for all that a record is asked."""
    return case.problem(target)


def estimate(record: Record, row: Record) -> float | None:
    """Return the estimate of a candidate, as far as the record says enough."""
    if row["kernel"] == "sm90_tiled":
        tile = tile_of(row)
        if tile is None:
            return None
        p = problem_of(record)
        return tiled_choice.corrected_us(p, tile, tiled_cost.us(p, tile), record["device"])
    if row["kernel"] == "cublaslt_pad_m":
        return padded_us(record, row)
    if row["kernel"] not in ("cublaslt", "cublaslt_relayout"):
        return SCALED_MM.kernel(row["kernel"]).us(problem_of(record))
    if not row["channels"]:
        return None
    more = RELAYOUT_US if row["kernel"].endswith("_relayout") else 0.0
    return corrected_us(work_of(record), config_of(row), row["workspace"], record["device"]) + more


BLOCK_TILES: Final = tuple(ordering.Config(128, 128, 1, *cluster) for cluster in ((2, 1, 4), (4, 1, 4), (4, 2, 6)))
"""The algorithms that the library has for scales that change along k: most of them."""


def padded_us(record: Record, row: Record) -> float | None:
    """Return the estimate of cublaslt_pad_m where it is compared. Old records do not name its algorithm."""
    p, work = problem_of(record), work_of(record)
    if not between_sectors(p):
        return None
    whole = work._replace(m=round_up(work.m, FOUR))
    offered = [(config_of(row), row["workspace"])] if row.get("channels") else [(tile, 0) for tile in BLOCK_TILES]
    return pad_m_us(p, min(corrected_us(whole, tile, bytes_, record["device"]) for tile, bytes_ in offered))


@contextmanager
def on(gpu: str) -> Iterator[None]:
    """Let estimates be those for a model of GPU meanwhile, whatever this machine has."""
    kept = corrections.gpu_of
    vars(corrections)["gpu_of"] = lambda _: gpu
    forget()
    try:
        yield
    finally:
        vars(corrections)["gpu_of"] = kept
        forget()


def forget() -> None:
    """Empty the memories of estimates that were made by other numbers, or for another GPU."""
    choices = tiled_choice.by_formula, tiled_choice.ranking, decode_cost.us, decode_cost.corrected_us
    for kept in (corrections.forest_of, *choices):
        kept.cache_clear()


def tile_of(row: Record) -> tiled_cost.Tile | None:
    """Return the tile of sm90_tiled that a record names, or None if there is none of that name."""
    return next((tile for tile in tiled_cost.TILES if str(tile) == row.get("name")), None)


def work_of(record: Record) -> ordering.Work:
    """Return what the time of a record's product depends on."""
    m, n, k, mode = (record[name] for name in ("m", "n", "k", "mode"))
    return ordering.Work(m, n, k, mode == "row", mode == "block", 2, record["multiprocessors"])


def config_of(row: Record) -> ordering.Config:
    """Return what a record says of an algorithm of the library."""
    return ordering.Config(*(row[name] for name in ordering.Config._fields))


def still(record: Record) -> Record:
    """Return a record without rows that the table of this checkout does not have, or that take other times in it."""
    names = {kernel.name for kernel in SCALED_MM.kernels}
    return {**record, "rows": [row for row in record["rows"] if row["kernel"] in names and is_of_today(record, row)]}


def is_of_today(record: Record, row: Record) -> bool:
    """Return whether a time is of the kernel as it is."""
    odd = 2 * record["n"] % tiled_cost.PIECE > 0  # bfloat16
    changes = (one for one in CHANGED if one.kernel == row["kernel"] and record["m"] <= one.up_to and odd >= one.odd)
    return all(str(record["started"]) >= one.since for one in changes if one.mode in ("", record["mode"]))


class Chosen(NamedTuple):
    """What the table chooses."""

    kernel: str
    name: str
    """Of the algorithm, as far as it is known where it was not measured."""
    row: int | None
    """Of the record, or None where it was not timed to the end."""


def chosen_today(record: Record) -> Chosen | None:
    """Return what the table of this checkout chooses for a record's product, or None if there is nothing.

    To be called while estimates are `on` the record's GPU.
    """
    rows = record["rows"]
    problem = problem_of(record)
    best: dict[str, int] = {}
    for i, row in enumerate(rows):
        other = best.setdefault(row["kernel"], i)
        mine, least = estimate(record, row), estimate(record, rows[other])
        if mine is not None and least is not None and mine < least:
            best[row["kernel"]] = i

    def measured(kernel: Kernel) -> Kernel:
        """Return a row of the table that is able, and knows what the library offered where it was measured."""
        made = kernel._replace(requires=())
        if "blaslt" not in kernel.name:
            return made
        found = estimate(record, rows[best[kernel.name]])
        return made if found is None else made._replace(us=lambda _: found)

    able = [
        measured(kernel) if kernel.name in best else kernel
        for kernel in SCALED_MM.kernels
        if kernel.name in best or "blaslt" not in kernel.name
    ]
    choice = Table("measured", ScaledMm, *able).choice(problem)
    if choice is None:
        return None
    row = best.get(choice.kernel)
    if choice.kernel != "sm90_tiled" or (row is not None and not rows[row].get("name")):
        return Chosen(choice.kernel, "", row)
    name = str(tiled_choice.fastest(problem))
    return Chosen(choice.kernel, name, next((i for i, one in enumerate(rows) if one.get("name") == name), None))


def report(found: Iterable[tuple[Record, float]]) -> None:
    """Print the gains of each part and mode, and the worst products of those that are fitted to: others stay blind."""
    pairs = list(found)
    for which in PARTS:
        for mode in ("all", *MODES):
            some = sorted(g for r, g in pairs if part(r) == which and mode in ("all", r["mode"]))
            if len(some) > 1:
                p90 = quantiles(some, n=10)[-1]
                line = f"median {median(some):.1%}, 90 % {p90:.1%}, worst {some[-1]:.1%}"
                print(f"{which:>5} {mode:>6}: {len(some)} products, {line}", flush=True)
    for record, lost in sorted((pair for pair in pairs if part(pair[0]) == "fit"), key=lambda pair: -pair[1])[:12]:
        best = min(record["rows"], key=lambda row: sum(row["us"]))
        print(
            f"{lost:6.1%} {record['mode']} {record['m']}x{record['n']}x{record['k']}: {record['first']}"
            f" in place of {best['kernel']} {best.get('name', best['algorithm'])}",
            flush=True,
        )


def noise(records: Iterable[Record]) -> list[float]:
    """Return how far the two times of each candidate lie apart, relative to the greater, in order."""
    return sorted(1 - min(row["us"]) / max(row["us"]) for record in records for row in record["rows"])
