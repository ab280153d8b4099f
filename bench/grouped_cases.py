"""Grouped products of mixtures of experts: those of models for some numbers of tokens, and randomly drawn ones."""

import math
import random
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Final, NamedTuple


class Model(NamedTuple):
    """The experts of a layer, or of a part of it that one GPU has."""

    experts: int
    each: int
    """Experts of a token."""
    share: int
    """GPUs that the experts are divided among: of so many tokens one expert is here."""
    shapes: tuple[tuple[int, int], ...]
    """n and k of gate and up together, and of down."""


MODELS: Final = {
    "Mixtral-8x7B": Model(8, 2, 1, ((28672, 4096), (4096, 14336))),
    "Qwen3-30B": Model(128, 8, 1, ((1536, 2048), (2048, 768))),
    "Qwen3-235B/8": Model(128, 8, 1, ((384, 4096), (4096, 192))),
    "DeepSeek-V3/8": Model(32, 8, 8, ((4096, 7168), (7168, 2048))),
}
MORE: Final = {
    "gpt-oss-20b": Model(32, 4, 1, ((5760, 2880), (2880, 2880))),
    "Llama-4-Scout/4": Model(16, 1, 1, ((4096, 5120), (5120, 2048))),
    "Qwen3-Next": Model(512, 10, 1, ((1024, 2048), (2048, 512))),
    "Mixtral-8x22B/2": Model(8, 2, 1, ((16384, 6144), (6144, 8192))),
    "Kimi-K2/16": Model(24, 8, 16, ((4096, 7168), (7168, 2048))),
    "GLM-4.5-Air": Model(128, 8, 1, ((2816, 4096), (4096, 1408))),
}
"""More models, for the choice of tiles; timed if they are named, or drawn."""
ALL: Final = {**MODELS, **MORE}
TOKENS: Final = (1, 16, 128, 1024, 2560, 4096)
MODES: Final = ("row", "block")


class Case(NamedTuple):
    """A model's product for a number of tokens."""

    model: str
    mode: str
    tokens: int
    n: int
    k: int
    skew: float = 0.0
    """The standard deviation of the experts' popularity, as a multiple of its average; 0: all are equally likely."""


SKEWS: Final = (0.0, 0.2, 0.4)
ROWS: Final = (64, 400)
"""The least and the largest average number of rows of an expert in drawn cases."""


def listed(models: Iterable[str], modes: Iterable[str], tokens: Iterable[int], skew: float) -> tuple[Case, ...]:
    """Return the products of models for some numbers of tokens."""
    return tuple(
        Case(model, mode, many, n, k, skew)
        for model, mode, many in product(models, modes, tokens)
        for n, k in ALL[model].shapes
    )


def drawn(count: int, seed: int) -> Iterator[Case]:
    """Yield products with so many rows that the height of tiles matters; they are determined by the seed."""
    chance = random.Random(seed)
    for _ in range(count):
        name, mode, skew = chance.choice(tuple(ALL)), chance.choice(MODES), chance.choice(SKEWS)
        model, rows = ALL[name], math.exp(chance.uniform(*map(math.log, ROWS)))
        tokens = max(1, round(rows * model.experts * model.share / model.each))
        yield Case(name, mode, tokens, *chance.choice(model.shapes), skew)
