"""Choices of experts, and loops over them that say where their rows belong."""

from typing import Any

import numpy as np

from support.engines import FLOATS, rng


def choices(tokens: int, each: int, experts: int, *, outside: bool = False, dtype: Any = np.int64) -> np.ndarray:
    """Return experts of each token, distinct ones where there are enough; some numbers of no expert if ``outside``."""
    random = rng(tokens, each, experts, outside)
    distinct = each <= experts
    chosen = [random.choice(max(experts, 1), each, replace=not distinct) for _ in range(tokens)]
    made = np.array(chosen, dtype).reshape(tokens, each)
    if outside and made.size:
        places = random.random(made.shape) < 0.3
        made[places] = random.choice([-1, -7, experts, experts + 1, np.iinfo(dtype).max, np.iinfo(dtype).min])
    return made


def placed(ids: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return by a loop where experts' rows end, the row of each choice, and the token of each row."""
    offs, inverse, tokens = np.zeros(experts, np.int32), np.full(ids.shape, -1, np.int32), []
    for expert in range(experts):
        for token, choice in np.argwhere(ids == expert).tolist():
            inverse[token, choice] = len(tokens)
            tokens.append(token)
        offs[expert] = len(tokens)
    return offs, inverse, tokens


def summed(y, inverse, weights, out):
    """Return the sums by a loop over choices: products and sums rounded in float32."""
    made = np.zeros((len(inverse), y.shape[1]), np.float32)
    for token, places in enumerate(inverse):
        for choice, place in enumerate(places):
            if 0 <= place < len(y):
                share = np.float32(1) if weights is None else np.float32(weights[token, choice])
                made[token] = made[token] + share * y[place].astype(np.float32)
    return made.astype(FLOATS[out])
