"""The samples that estimates are fitted to: measured times of each kernel, each with its weight and its estimate."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from bench.choice_records import BLOCK_TILES, Record, config_of, every, is_of_today, part, problem_of, tile_of, work_of
from bench.fitting.batches import Call
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm import fallback_cost
from fp8core.kernels.gemm.blaslt import ordering
from fp8core.kernels.gemm.blaslt.corrections import features as library_features
from fp8core.kernels.gemm.blaslt.mapping import FOUR
from fp8core.kernels.gemm.sm90 import decode_cost, tiled_choice, tiled_cost
from fp8core.kernels.gemm.sm90.decode import config_for
from fp8core.kernels.gemm.sm90.decode_config import MOST_ROWS
from fp8core.problem import ScaledMm

CONSTANTS_FALL, TREES_FALL = 6.0, 2.0
"""The weight of a candidate is exp(-FALL * (time / least - 1)), with the least time of its product and kernel."""


class Sample(NamedTuple):
    """A measured time in µs, its weight, and a call that returns its estimate with the present constants."""

    ask: Call
    us: float
    weight: float


def records_of(files: Sequence[Path]) -> Iterator[Record]:
    """Yield every record that is not blind, with all repetitions of a measurement."""
    yield from (record for record in every(files) if part(record) == "fit")


def mean_us(row: Record) -> float:
    """Return the mean time of a candidate in µs."""
    return float(sum(row["us"])) / len(row["us"])


def rows_of(record: Record, kernel: str, fall: float) -> Iterator[tuple[Record, float]]:
    """Yield the rows of a kernel's candidates and their weights."""
    rows = [row for row in record["rows"] if row["kernel"] == kernel]
    least = min(map(mean_us, rows), default=0.0)
    yield from ((row, math.exp(-fall * (mean_us(row) / least - 1))) for row in rows)


class Offer(NamedTuple):
    """An algorithm of cuBLASLt for a product: the key by which measurements are grouped."""

    work: ordering.Work
    config: ordering.Config
    workspace: int


def _offers(records: Iterable[Record], fall: float) -> Iterator[tuple[Record, Record, Offer, float]]:
    for record in records:
        for row, weight in rows_of(record, "cublaslt", fall):
            if row["channels"]:
                yield record, row, Offer(work_of(record), config_of(row), row["workspace"]), weight


def offers(records: Iterable[Record]) -> dict[Offer, tuple[float, float]]:
    """Return the mean time and weight of each algorithm of each product."""
    found: dict[Offer, list[tuple[float, float]]] = {}
    for _, row, key, weight in _offers(records, CONSTANTS_FALL):
        found.setdefault(key, []).append((mean_us(row), weight))
    return {
        key: (sum(us for us, _ in all_) / len(all_), sum(w for _, w in all_) / len(all_)) for key, all_ in found.items()
    }


class Asked(NamedTuple):
    """A sample that trees are fitted to."""

    product: int
    """A number that all times of one product in one run share."""
    features: tuple[float, ...]
    estimate: float
    us: float
    weight: float


def asked_of_library(records: Iterable[Record]) -> Iterator[Asked]:
    """Yield the times of cuBLASLt's algorithms with their features."""
    for record, row, key, weight in _offers(records, TREES_FALL):
        estimate = ordering.us(*key)
        yield Asked(id(record), library_features(*key, estimate), estimate, mean_us(row), weight)


def asked_of_tiles(records: Iterable[Record]) -> Iterator[Asked]:
    """Yield the times of sm90_tiled's tiles with their features."""
    for record, row, tile, weight in _tiles(records, TREES_FALL):
        p = problem_of(record)
        estimate = tiled_cost.us(p, tile)
        yield Asked(id(record), tiled_choice.features(p, tile, estimate), estimate, mean_us(row), weight)


def asked_of_decode(records: Iterable[Record]) -> Iterator[Asked]:
    """Yield the times of sm90_decode with their features."""
    for record, row in _decodes(records):
        p = problem_of(record)
        config = config_for(p)
        estimate = decode_cost.launch_us(p, config)
        yield Asked(id(record), decode_cost.features(p, config, estimate), estimate, mean_us(row), 1.0)


def of_library(records: Iterable[Record]) -> list[Sample]:
    """Return the samples of cuBLASLt's algorithms, the mean of all measurements for each."""
    return [Sample(Call(ordering.us, key), us, weight) for key, (us, weight) in offers(records).items()]


def _tiles(records: Iterable[Record], fall: float) -> Iterator[tuple[Record, Record, tiled_cost.Tile, float]]:
    for record in records:
        for row, weight in rows_of(record, "sm90_tiled", fall):
            tile = tile_of(row)
            if tile is not None and tile.split_k == 1 and is_of_today(record, row):
                yield record, row, tile, weight


def of_tiles(records: Iterable[Record]) -> list[Sample]:
    """Return the samples of sm90_tiled's tiles."""
    return [
        Sample(Call(tiled_cost.us, (problem_of(record), tile)), mean_us(row), weight)
        for record, row, tile, weight in _tiles(records, CONSTANTS_FALL)
    ]


def _decodes(records: Iterable[Record]) -> Iterator[tuple[Record, Record]]:
    for record in records:
        for row, _ in rows_of(record, "sm90_decode", 0.0):
            if record["m"] <= MOST_ROWS and is_of_today(record, row):
                yield record, row


def of_decode(records: Iterable[Record]) -> list[Sample]:
    """Return the samples of sm90_decode."""
    found = []
    for record, row in _decodes(records):
        p = problem_of(record)
        config = config_for(p)
        found.append(Sample(Call(decode_cost.launch_us, (p, config)), mean_us(row), 1.0))
    return found


FALLBACKS: Final[dict[str, Callable[[ScaledMm], float]]] = {
    "realigned": fallback_cost.realigned_us,
    "generic_decode": fallback_cost.generic_decode_us,
    "generic_mma": fallback_cost.generic_mma_us,
}
BESIDE: Final[dict[str, Callable[[ScaledMm, float], float]]] = {
    "cublaslt_pad_m": fallback_cost.pad_m_us,
    "cublaslt_split_m": fallback_cost.split_m_us,
    "cublaslt_epilogue": fallback_cost.epilogue_us,
}


def library_us(record: Record, kernel: str) -> float:
    """Return the estimate in µs of the cuBLASLt product that a kernel of `BESIDE` contains."""
    work = work_of(record)
    if kernel == "cublaslt_epilogue":
        rows = [row for row in record["rows"] if row["kernel"] == kernel and row["channels"]]
        work = work._replace(vectors=False, out_bytes=4)
        return min(ordering.us(work, config_of(row), row["workspace"]) for row in rows)
    whole = ceil_div(work.m, FOUR) if kernel == "cublaslt_pad_m" else work.m // FOUR
    return min(ordering.us(work._replace(m=FOUR * whole), config, 0) for config in BLOCK_TILES)


def of_fallbacks(records: Iterable[Record]) -> list[Sample]:
    """Return the samples of fallbacks: kernels for products that other kernels do not take."""
    found = []
    for record in records:
        for name, us in FALLBACKS.items():
            for row, _ in rows_of(record, name, 0.0):
                if is_of_today(record, row):
                    p = problem_of(record)
                    found.append(Sample(Call(partial(us, p)), mean_us(row), 1.0))
        for name, beside in BESIDE.items():
            for row, weight in rows_of(record, name, CONSTANTS_FALL):
                p, least = problem_of(record), library_us(record, name)
                found.append(Sample(Call(partial(beside, p, least)), mean_us(row), weight))
    return found
