"""Right calls of grouped products: ends of any value, and operands laid out in any way that is taken."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

import fp8core
from soak.arena import Arena
from soak.product_cases import bounded
from soak.strategies import Case, Draw, codes, converted, layouts, numbers, offsets, scales, seeds
from support import reference
from support.grouped import MODES, SHAPES, rows_of
from support.products import ceil


def _scale_shapes(mode: str, groups: int, rows: int, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    of_a, of_b = mode.split("-")
    across, blocks = ceil(k, 128), ceil(n, 128)
    return (
        {"tensor": (1,), "row": (rows, 1), "group": (rows, across)}[of_a],
        {
            "tensor": (1,),
            "each": (groups, 1, 1),
            "row": (groups, n, 1),
            "block": (groups, blocks, across),
            "group": (groups, n, across),
        }[of_b],
    )


def grouped_scaled_mm_nt(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw a grouped product; where rows of no group are in given memory, nothing may be written to them."""
    groups, rows = draw(st.integers(0, 4)), draw(st.integers(0, 9))
    n, k = draw(st.sampled_from((1, 3, 16, 100, 130, 0))), draw(st.sampled_from((1, 7, 64, 128, 129, 200, 0)))
    mode = draw(st.sampled_from(MODES))
    of_a, of_b = (SHAPES[kind] for kind in mode.split("-"))
    ends = np.array(draw(st.lists(st.integers(-2, 12), min_size=groups, max_size=groups)), np.int32)
    a, b = (codes(shape, "float8_e4m3fn", "ordinary", draw(seeds)) for shape in ((rows, k), (groups, n, k)))
    scale_a, scale_b = (scales(shape, draw(seeds)) for shape in _scale_shapes(mode, groups, rows, n, k))
    out = draw(st.sampled_from(("bfloat16", "float16", "float32")))
    options: dict[str, Any] = {"out_dtype": out, "use_fast_accum": draw(st.booleans())}
    bias = numbers((groups, n), draw(st.sampled_from((out, "float32"))), "ordinary", 7) if draw(st.booleans()) else None
    if bias is not None:
        options["bias"] = arena.put(bias, draw(layouts))
    wide_a = reference.spread(np.atleast_2d(scale_a), of_a, (rows, k)) * a.astype(np.float64)
    exact, magnitude = np.zeros((rows, n)), np.zeros((rows, n))
    parts = rows_of(ends, rows)
    for i, part in enumerate(parts):
        scale = scale_b.reshape(1, 1) if scale_b.ndim == 1 else scale_b[i]
        wide_b = reference.spread(scale, of_b, (n, k)) * b[i].astype(np.float64)
        added = np.zeros(n) if bias is None else bias[i].astype(np.float64)
        exact[part] = wide_a[part] @ wide_b.T + added
        magnitude[part] = np.abs(wide_a[part]) @ np.abs(wide_b).T + np.abs(added)
    given, filled = draw(st.booleans()), parts[-1].stop if parts else 0
    written = ()
    if given:
        place = options["out"] = arena.put(converted(np.full((rows, n), 77.0), out), draw(layouts))
        written = (place._replace(shape=(filled, n)),)

    def check(result: Any) -> None:
        got = engine.numpy(result)
        assert got.shape == (rows, n)
        bounded(np.ascontiguousarray(got)[:filled], exact[:filled], magnitude[:filled], out)

    places = arena.put(a, draw(layouts)), arena.put(b, draw(layouts)), arena.put(scale_a, draw(offsets))
    options["offs"] = arena.put(ends, draw(offsets))
    places = *places, arena.put(scale_b, draw(layouts))
    names = ("a", "weight", "scale_a", "scale_b")
    return Case(fp8core.grouped_scaled_mm_nt, places, options, check, written, "answer", names)
