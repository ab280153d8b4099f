"""Cross-validates the estimates: what the choice loses on products whose weights were not used in the fit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from bench import fit_estimates
from bench.choice_cases import number
from bench.choice_records import MEASURED, Record, forget, gains_today, latest
from bench.fitting import trees
from bench.fitting.models import MODELS
from fp8core.kernels.gemm import corrections

DECIDING: Final = "ordering", "tiled_cost", "decode_cost"
"""The cost models that decide the choice."""


def part_of(record: Record, parts: int) -> int:
    """Return the index of the part that a record is in, by its weight's shape."""
    return number(f"cross {record['n']}x{record['k']}") % parts


@contextmanager
def fitted(records: Sequence[Record], steps: int) -> Iterator[None]:
    """Use constants and trees that are fitted to some records of one model of GPU, within the block.

    The constants stay as they are if the records are not of the GPU whose times constants are fitted to.
    """
    gpu = records[0]["device"]
    models = [MODELS[name] for name in DECIDING if gpu == MEASURED]
    before = [constant for model in models for constant in model.constants()]
    kept = corrections.trees
    try:
        for model in models:
            fit_estimates.search(model, model.samples(records), steps)
        grown = {gpu: trees.grown(records)}
        vars(corrections)["trees"] = lambda: grown
        forget()
        yield
    finally:
        for constant in before:
            constant.put(constant.value)
        vars(corrections)["trees"] = kept
        forget()


def crossed(records: Sequence[Record], parts: int, steps: int) -> Iterator[tuple[Record, float]]:
    """Yield each record with the loss of the choice by estimates that were fitted to the other parts."""
    for number_ in range(parts):
        others = [record for record in records if part_of(record, parts) != number_]
        with fitted(others, steps):
            yield from gains_today(latest(record for record in records if part_of(record, parts) == number_))
