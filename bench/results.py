"""Reads and writes the results of benchmarks: JSON lines, as records by kind. Times are in microseconds by default.

A file has one or more runs. A run begins with a line about the machine. The lines of a subject end with a line about
its status, which is missing or null if the subject was stopped; a run that continues such a subject has the rest of its
lines. A line names its kind in "bench"; lines of quantize, fused, weights and decode are recognized by their fields.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import former, roofline
from bench.labels import BASELINES, BLOCK, DECODE, LABELS, LIBRARY

Record = dict[str, Any]

FORMAT: Final = 2
"""The format of runs that are written now, in the line about the machine; runs without one are of format 1."""

LARGE: Final = 100e6
"""From this many bytes on, memory bandwidth alone determines the time."""

_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "fused": ("kind", "mode", "rows", "cols"),
    "decode": ("mode", "m", "n", "k"),
    "linear": ("bench", "m", "n", "k"),
    "ending": ("bench", "mode", "m", "n", "k"),
    "invariance": ("bench", "mode", "m", "n", "k"),
    "odd": ("mode", "x", "rows", "cols"),
    "odd_products": ("bench", "scales", "ending", "m", "n", "k"),
    "first_call": ("bench",),
    "weights": ("case", "rows", "cols"),
    "quantize": ("mode", "rows", "cols"),
    "engine": ("mode",),
    "layer": ("bench", "model", "m"),
    "hf_decoder": ("bench", "mode", "m"),
    "hf_experts": ("bench", "mode", "m"),
    "grouped": ("bench", "model", "mode", "tokens", "n", "k", "skew"),
    "moe": ("bench", "model", "mode", "tokens"),
    "choice": ("bench", "mode", "m", "n", "k"),
    "accuracy": ("bench", "mode", "data", "m", "n", "k", "kernel", "fast", "out"),
    "against": ("kind", "case"),
    "overhead": ("framework", "step"),
    "calls": ("framework", "step"),
    "jax_layer": ("bench", "m"),
    "machine": ("command",),
    "subject": ("subject",),
}
"""By kind: the fields that distinguish records, in the order in which lines without a kind are tried."""


class Results(NamedTuple):
    """The records of each kind, with the last record of each case. ``machine`` has all commands as "commands"."""

    machine: Record
    subject: Sequence[Record]
    quantize: Sequence[Record]
    odd: Sequence[Record]
    fused: Sequence[Record]
    weights: Sequence[Record]
    decode: Sequence[Record]
    linear: Sequence[Record]
    invariance: Sequence[Record]
    first_call: Sequence[Record]
    layer: Sequence[Record]
    calls: Sequence[Record]
    overhead: Sequence[Record]
    engine: Sequence[Record]
    against: Sequence[Record]
    jax_layer: Sequence[Record] = ()
    hf_decoder: Sequence[Record] = ()
    hf_experts: Sequence[Record] = ()
    grouped: Sequence[Record] = ()
    moe: Sequence[Record] = ()
    choice: Sequence[Record] = ()
    accuracy: Sequence[Record] = ()
    ending: Sequence[Record] = ()
    odd_products: Sequence[Record] = ()

    @property
    def device(self) -> str:
        """The name of the device or processor."""
        return str(self.machine.get("device") or self.machine.get("cpu") or "unnamed machine")

    @property
    def memory(self) -> str:
        """The memory's bandwidth that the floors are computed with, as text."""
        return roofline.rates(self.machine.get("device")).memory


class Part(NamedTuple):
    """The records of one subject of a run; its status is None if it was stopped."""

    subject: str
    status: int | None
    records: Sequence[Record]


class Run(NamedTuple):
    """The output of one command: the name of the file, the line about the machine, and the records of each subject."""

    file: str
    machine: Record
    parts: list[Part]


def kind_of(record: Record) -> str:
    """Return the kind of a record: the benchmark that wrote it.

    Raises:
        ValueError: no known benchmark has written it.
    """
    named = record.get("bench")
    if named in _KEYS:
        return str(named)
    for kind, keys in _KEYS.items():
        if named is None and keys and all(key in record for key in keys):
            return kind
    raise ValueError(f"a line needs to be of a known benchmark, got one with {sorted(record)}")


def key_of(record: Record) -> tuple[Any, ...]:
    """Return the kind of a record, and the values that distinguish it from others of its kind."""
    kind = kind_of(record)
    return kind, *(record[key] for key in _KEYS[kind])


def append(path: Path | None, *records: Record) -> None:
    """Add a line for each record to the file, if there is one."""
    if path is None:
        return
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, separators=(",", ":")) + "\n" for record in records)


def runs(path: Path) -> list[Run]:
    """Return the runs of a file, in order.

    The records of a stopped subject are moved to the run that continued it.

    Raises:
        ValueError: a line is not of a known benchmark.
    """
    found: list[Run] = []
    parts: list[Part] = []
    records: list[Record] = []
    for line in filter(str.strip, path.read_text(encoding="utf-8").splitlines()):
        record = former.renamed(line)
        kind = kind_of(record)
        if kind == "machine" or not found:
            parts, records = [], []
            found.append(Run(path.name, record if kind == "machine" else {}, parts))
        if kind == "machine":
            continue
        if not records:
            records = []
            parts.append(Part("", None, records))
        records.append(record)
        if kind == "subject":
            if found[-1].machine.get("format", 1) < FORMAT:
                record["subject"] = former.SUBJECTS.get(record["subject"], record["subject"])
            parts[-1] = Part(record["subject"], record.get("status"), records)
            if found[-1].machine.get("goes_on"):
                _join(found, record["subject"])
            records = []
    return found


def _join(found: Sequence[Run], subject: str) -> None:
    """Move the records that stopped runs left of a subject to the last part of the last run."""
    last = found[-1].parts[-1]
    for other in found[:-1]:
        for part in [part for part in other.parts if part.subject == subject and part.status is None]:
            other.parts.remove(part)
            last = last._replace(records=[*part.records, *last.records])
    found[-1].parts[-1] = last


def stopped(runs: Iterable[Run]) -> dict[str, Sequence[Record]]:
    """Return the records of the subjects that were stopped and have not been finished since."""
    latest = {part.subject: part for run in runs for part in run.parts}
    return {name: part.records for name, part in latest.items() if name and part.status is None}


def finished(runs: Iterable[Run]) -> set[str]:
    """Return the subjects that succeeded."""
    return {part.subject for run in runs for part in run.parts if part.status == 0}


def collect(runs: Iterable[Run]) -> Results:
    """Return the records of runs by their kinds.

    Raises:
        ValueError: the runs are from different GPUs.
    """
    found: dict[str, dict[tuple[Any, ...], Record]] = {kind: {} for kind in _KEYS}
    about: Record = {"commands": []}
    gpus = set()
    for run in runs:
        if run.machine:
            about |= {**run.machine, "commands": [*about["commands"], run.machine["command"]]}
            gpus |= {run.machine["device"]} if "device" in run.machine else set()
        for record in (record for part in run.parts for record in part.records):
            kind, *key = key_of(record)
            record |= {"date": run.machine.get("date"), "gpu": run.machine.get("device")}
            found[kind][tuple(key)] = record
    if len(gpus) > 1:
        raise ValueError(f"results to compare need to be of one GPU, got {', '.join(sorted(gpus))}")
    del found["machine"]
    return Results(machine=about, **{kind: list(records.values()) for kind, records in found.items()})


def read(path: Path) -> Results:
    """Return the records of a file of JSON lines, which may come from several commands on one machine.

    Raises:
        ValueError: a line is not of a known benchmark, or the lines are from different GPUs.
    """
    return collect(runs(path))


def dates(records: Iterable[Record]) -> str:
    """Return the days on which records were measured."""
    return " and ".join(sorted({str(record["date"]) for record in records if record.get("date")}))


def us(record: Record, name: str) -> float | None:
    """Return the median time of a variant, or None if the record has none."""
    timing = record.get("us", {}).get(name)
    return None if timing is None else float(timing["median"])


def moved(record: Record) -> float:
    """Return the bytes that a case has to move, computed from its floor (invalid for compute-bound products)."""
    return float(record["floor_us"]) * roofline.rates(record.get("gpu")).bandwidth / 1e6


def own_kernel(record: Record) -> float | None:
    """Return the time of a product by a kernel of fp8core, the one that a call gets if it is one of them, or None."""
    names = (BLOCK, DECODE) if record.get("runs") == BLOCK else (DECODE, BLOCK)
    return next((t for name in names if (t := us(record, name)) is not None), None)


def own(record: Record) -> float | None:
    """Return the time of what fp8core runs; if the record does not name it, of its own kernel or else the library."""
    names = ("fp8core", record.get("runs", DECODE), DECODE, BLOCK, LIBRARY)
    return next((t for name in names if (t := us(record, name)) is not None), None)


def best_baseline(record: Record) -> tuple[float, str] | None:
    """Return the least time of the baselines, and the name of that baseline."""
    return min(((t, name) for name in BASELINES if (t := us(record, name)) is not None), default=None)


def neighbour_time(record: Record) -> float | None:
    """Return the time of an odd shape's aligned neighbour, scaled up to the bytes of the odd shape if it has more."""
    time = us(record, "neighbour")
    return None if time is None else time * max(1.0, record["floor_us"] / record["neighbour_floor_us"])


def of_neighbour(record: Record) -> float:
    """Return the time of an odd product as a multiple of the next aligned one's."""
    mine, near = (float(record["us"][name]["median"]) for name in ("fp8core", "neighbour"))
    return mine / near


def of_copy(record: Record) -> float | None:
    """Return the speed of fp8core's kernel as a fraction of that of a copy of as many bytes."""
    mine, copy = us(record, "fp8core"), us(record, "copy")
    return None if mine is None or copy is None else copy / mine


def large(records: Iterable[Record]) -> list[Record]:
    """Return the records of cases that move at least `LARGE` bytes."""
    return [record for record in records if moved(record) >= LARGE]


def shape(record: Record) -> str:
    """Return a record's shape as text; empty if it has none."""
    for keys in (("m", "n", "k"), ("rows", "cols")):
        if all(key in record for key in keys):
            return "x".join(str(record[key]) for key in keys)
    return f"m={record['m']}" if "m" in record else ""


def values(function: Callable[[Record], float | None], records: Iterable[Record]) -> list[float]:
    """Return the values of a function for all records for which it is not None."""
    return [found for record in records if (found := function(record)) is not None]


def names(records: Iterable[Record], of: Sequence[str] = tuple(LABELS)) -> list[str]:
    """Return the variants that have a time in any of the records, in the order of ``of``."""
    timed = {name for record in records for name in record.get("us", {})}
    return [name for name in of if name in timed]
