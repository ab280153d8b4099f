"""Read, judge and report the records of `bench.choice`: the times of each candidate for many products."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from bench import roofline
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
from fp8core.problem import ScaledMm
from fp8core.table import Kernel, Table
from fp8core.target import Target

Record = dict[str, Any]
MEASURED: Final = roofline.H200
"""The model of GPU that the constants are fitted to."""
H200: Final = Target("cuda", 90, 0, 132, 32, 227 << 10)
MEDIAN_GOAL, WORST_GOAL = 0.03, 0.10
"""The most that tuning may gain: at the median and at worst."""
CLOSE: Final = 1.6
"""Candidates that take this many times as long as the fastest in a first short timing are not timed further."""
PARTS: Final = "fit", "judge"


class Change(NamedTuple):
    """A change to the speed of a kernel of this library: earlier times of the kernel no longer count."""

    kernel: str
    since: str
    mode: str = ""
    """The only mode of scales whose speed changed, or empty for all modes."""
    up_to: int = MOST_ROWS
    """Only products of at most this many rows changed."""
    odd: bool = False
    """Whether only results changed whose rows are not multiples of `PIECE` bytes."""


CHANGED: Final = (
    Change("sm90_tiled", "2026-11-22T22:10"),
    Change("sm90_tiled", "2026-11-23T07:30", "block", 64),
    Change("sm90_tiled", "2026-11-23T21:20", odd=True),
    Change("sm90_decode", "2026-11-23T01:20"),
    Change("realigned", "2026-11-24T00:00"),
    Change("realigned", "2026-11-26T22:30", odd=True),
    Change("sm90_decode_unaligned", "2026-11-27T16:00"),
)
"""Add a line when you make a kernel faster or slower, with the time of the first run of the new kernel: earlier times
of it are then neither fitted to nor judged."""


def read(files: Iterable[Path]) -> list[Record]:
    """Return the records of files, the last one for each product, model of GPU and set of kernels."""
    return latest(every(files))


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the last record for each product, model of GPU and set of kernels."""
    return list({(one["device"], *key(one), *one.get("only", ())): one for one in records}.values())


def every(files: Iterable[Path]) -> Iterator[Record]:
    """Yield the records of files, each with its file's name, and its run's GPU, multiprocessors and start."""
    for file in files:
        machine: Record = {}
        for record in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if record["bench"] == "machine":
                machine = {name: record[name] for name in ("device", "multiprocessors", "started")}
            elif record["bench"] == "choice":
                yield {**record, **machine, "file": file.stem}


def key(record: Record) -> tuple[str | int, ...]:
    """Return the mode and the sizes of a record's product."""
    return tuple(record[name] for name in Case._fields)


def part(record: Record) -> str:
    """Return "judge" for a record of the blind half of a list, else "fit"."""
    return "judge" if record.get("list") in BLIND and record["half"] == "judge" else "fit"


def whole(record: Record) -> bool:
    """Return whether all kernels were timed, except for hopeless ones."""
    return not record.get("only") and record.get("list") != "odd"


def gain(us: Sequence[Sequence[float]], chosen: int | None) -> float:
    """Return how much slower the chosen candidate is than the one that tuning finds, as a fraction of the latter.

    Tuning takes the fastest by the times of one half of the turns, and the times of the other half judge it. ``chosen``
    is None if the candidate was too slow to be timed to the end; it then counts as `CLOSE` times the fastest.
    """
    found = []
    for known, judged in ((0, 1), (1, 0)):
        best = min(range(len(us)), key=lambda i: us[i][known])
        found.append(us[chosen][judged] / us[best][judged] if chosen is not None else CLOSE)
    return sum(found) / 2 - 1


def gains(records: Iterable[Record]) -> Iterator[tuple[Record, float]]:
    """Yield each record and the gain of tuning over the choice at the time of measurement."""
    for record in filter(whole, records):
        names = [[row["kernel"], row["algorithm"]] for row in record["rows"]]
        if record["first"] in names:
            yield record, gain([row["us"] for row in record["rows"]], names.index(record["first"]))


def gains_today(records: Iterable[Record]) -> Iterator[tuple[Record, float]]:
    """Yield each record and the gain of tuning over the choice of this checkout; this needs no GPU."""
    for gpu, of_gpu in groupby(map(still, filter(whole, records)), key=lambda record: str(record["device"])):
        with on(gpu):  # once for all records of a GPU, since it clears all caches of estimates
            made = [(record, chosen_today(record)) for record in of_gpu if record["rows"]]
        for record, chosen in made:
            if chosen is not None and (chosen.row is not None or [chosen.kernel, chosen.name] in record.get("far", ())):
                yield record, gain([row["us"] for row in record["rows"]], chosen.row)


def problem_of(record: Record) -> ScaledMm:
    """Return the product of a record, on a GPU with as many multiprocessors as the measurement had."""
    return problem(Case(*key(record)), H200._replace(multiprocessors=record["multiprocessors"]))  # type: ignore[arg-type]


@cache
def problem(case: Case, target: Target) -> ScaledMm:
    """Return `Case.problem`, cached: it asks the whole table, and each estimate of a record needs it."""
    return case.problem(target)


def estimate(record: Record, row: Record) -> float | None:
    """Return the estimate of a candidate in µs, or None if the record does not say enough for one."""
    if row["kernel"] == "sm90_tiled":
        tile = tile_of(row)
        if tile is None:
            return None
        return tiled_choice.corrected_us(problem_of(record), tile, record["device"])
    if row["kernel"] == "cublaslt_pad_m":
        return padded_us(record, row)
    if row["kernel"] not in ("cublaslt", "cublaslt_relayout"):
        return SCALED_MM.kernel(row["kernel"]).us(problem_of(record))
    if not row["channels"]:
        return None
    more = RELAYOUT_US if row["kernel"].endswith("_relayout") else 0.0
    return corrected_us(work_of(record), config_of(row), row["workspace"], record["device"]) + more


BLOCK_TILES: Final = tuple(ordering.Config(128, 128, 1, *cluster) for cluster in ((2, 1, 4), (4, 1, 4), (4, 2, 6)))
"""Most of the algorithms that cuBLASLt has for scales that change along k."""


def padded_us(record: Record, row: Record) -> float | None:
    """Return the estimate of cublaslt_pad_m in µs, or None where it is not compared by its estimate.

    Old records do not name its algorithm: they count as the fastest of `BLOCK_TILES`.
    """
    p, work = problem_of(record), work_of(record)
    if not between_sectors(p):
        return None
    whole = work._replace(m=round_up(work.m, FOUR))
    offered = [(config_of(row), row["workspace"])] if row.get("channels") else [(tile, 0) for tile in BLOCK_TILES]
    return pad_m_us(p, min(corrected_us(whole, tile, bytes_, record["device"]) for tile, bytes_ in offered))


@contextmanager
def on(gpu: str) -> Iterator[None]:
    """Make estimates those for a model of GPU within the block, whatever GPU this machine has."""
    try:
        with patch.object(corrections, "gpu_of", lambda _: gpu):
            forget()
            yield
    finally:
        forget()


def forget() -> None:
    """Clear the caches of estimates, which depend on the constants, the trees and the model of GPU."""
    choices = tiled_choice.by_formula, tiled_choice.ranking, decode_cost.us, decode_cost.corrected_us
    for kept in (corrections.forest_of, *choices):
        kept.cache_clear()


def tile_of(row: Record) -> tiled_cost.Tile | None:
    """Return the tile of sm90_tiled that a record names, or None if there is none of that name."""
    return next((tile for tile in (*tiled_cost.TILES, *tiled_cost.SPLIT_TILES) if str(tile) == row.get("name")), None)


def work_of(record: Record) -> ordering.Work:
    """Return what the time of a record's product depends on."""
    m, n, k, mode = (record[name] for name in ("m", "n", "k", "mode"))
    return ordering.Work(m, n, k, mode == "row", mode == "block", 2, record["multiprocessors"])


def config_of(row: Record) -> ordering.Config:
    """Return the configuration of the cuBLASLt algorithm of a row."""
    return ordering.Config(*(row[name] for name in ordering.Config._fields))


def still(record: Record) -> Record:
    """Return a record without the rows of kernels that this checkout lacks, or that were changed since."""
    names = {kernel.name for kernel in SCALED_MM.kernels}
    return {**record, "rows": [row for row in record["rows"] if row["kernel"] in names and is_of_today(record, row)]}


def is_of_today(record: Record, row: Record) -> bool:
    """Return whether a row was measured after the last change to the speed of its kernel."""
    odd = 2 * record["n"] % tiled_cost.PIECE > 0  # bfloat16
    changes = (one for one in CHANGED if one.kernel == row["kernel"] and record["m"] <= one.up_to and odd >= one.odd)
    return all(str(record["started"]) >= one.since for one in changes if one.mode in ("", record["mode"]))


class Chosen(NamedTuple):
    """The choice of the table."""

    kernel: str
    name: str
    """The tile of sm90_tiled; empty for other kernels, and for records that do not name their tiles."""
    row: int | None
    """The index of its row in the record, or None if it was not timed to the end."""


def chosen_today(record: Record) -> Chosen | None:
    """Return the choice of this checkout's table for a record's product, or None if no kernel is able.

    Call it within `on` for the record's GPU.
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
        """Return a kernel without its requirements; cuBLASLt's has the estimate of the best algorithm in the record."""
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
                p90 = min(quantiles(some, n=10)[-1], some[-1])  # of few values it would lie beyond them
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
    """Return the difference of the two times of each candidate, relative to the longer one, in ascending order."""
    return sorted(1 - min(row["us"]) / max(row["us"]) for record in records for row in record["rows"])
