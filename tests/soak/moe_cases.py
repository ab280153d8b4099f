"""Right calls of the functions that sort the rows of tokens by expert and sum them again: any choices, any layout."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

import fp8core
from fp8core import Quantized
from soak.arena import Arena
from soak.strategies import (
    COLS,
    Case,
    Draw,
    codes,
    converted,
    fp8,
    layouts,
    numbers,
    offsets,
    same,
    scales,
    seeds,
    wide,
)
from support.moe import placed, summed


def _pair(data: Any, scale: Any, topk_ids: Any, experts: int) -> Any:
    (codes, scales), offs, inverse = fp8core.moe_permute(Quantized(data, scale), topk_ids, experts)
    return codes, offs, inverse, scales


def moe_permute(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw tokens and the experts of each, some of which do not exist; codes may have scales per token or by groups."""
    tokens, each, experts = draw(st.integers(0, 9)), draw(st.integers(0, 4)), draw(st.integers(0, 7))
    cols, dtype = draw(st.sampled_from((*COLS, 0))), draw(st.one_of(wide, fp8))
    eight = dtype.startswith("float8")
    x = (codes if eight else numbers)((tokens, cols), dtype, "special", draw(seeds))
    chosen = draw(st.lists(st.integers(-2, 8), min_size=tokens * each, max_size=tokens * each))
    ids = np.array(chosen, draw(st.sampled_from((np.int32, np.int64)))).reshape(tokens, each)
    scale = None
    if eight and draw(st.booleans()):
        scale = scales(draw(st.sampled_from(((tokens,), (tokens, 1), (tokens, 3)))), draw(seeds))
    offs, inverse, of = placed(ids, experts)

    def check(result: Any) -> None:
        rows = engine.codes(result[0]).reshape(ids.size, cols) if eight else engine.numpy(result[0])
        same(np.ascontiguousarray(rows[: len(of)]).view(np.uint8), x[of].view(np.uint8), "rows")
        same(engine.numpy(result[1]), offs, "offs")
        same(engine.numpy(result[2]), inverse, "inverse")
        if scale is not None:
            same(np.ascontiguousarray(engine.numpy(result[3])[: len(of)]), scale[of], "scale")

    index = arena.put(ids, draw(offsets))
    args = arena.put(x, draw(layouts)), index, experts
    if scale is None:
        return Case(fp8core.moe_permute, args, {}, check, (), "answer", ("x", "topk_ids", "experts"))
    place = arena.put(scale, draw(layouts if scale.ndim > 1 else offsets))
    return Case(_pair, (args[0], place, *args[1:]), {}, check, (), "answer", ("x", "scale", "topk_ids", "experts"))


def moe_unpermute(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw results of experts, the places of each token's, some of which do not exist, and weights or none."""
    rows, tokens, each = draw(st.integers(0, 9)), draw(st.integers(0, 6)), draw(st.integers(0, 4))
    cols, dtype, out = draw(st.sampled_from((*COLS, 0))), draw(wide), draw(wide)
    y = numbers((rows, cols), dtype, "ordinary", draw(seeds))
    places = draw(st.lists(st.integers(-2, 12), min_size=tokens * each, max_size=tokens * each))
    inverse = np.array(places, np.int32).reshape(tokens, each)
    weights = numbers((tokens, each), draw(wide), "ordinary", draw(seeds)) if draw(st.booleans()) else None
    want, options, written = summed(y, inverse, weights, out), {"out_dtype": out}, ()
    if draw(st.booleans()):
        options["out"] = arena.put(converted(np.full((tokens, cols), 77.0), out), draw(layouts))
        written = (options["out"],)
    args = arena.put(y, draw(layouts)), arena.put(inverse, draw(offsets))
    if weights is not None:
        options["topk_weights"] = arena.put(weights, draw(offsets))

    def check(result: Any) -> None:
        same(np.ascontiguousarray(engine.numpy(result)), want, "sums")

    return Case(fp8core.moe_unpermute, args, options, check, written, "answer", ("y", "inverse", "topk_weights"))
