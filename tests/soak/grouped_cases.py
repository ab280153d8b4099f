"""Right calls of grouped products: ends of any value, and operands laid out in any way that is taken."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

import fp8core
from soak.arena import Arena
from soak.product_cases import bounded
from soak.strategies import Case, Draw, codes, converted, layouts, numbers, offsets, scales, seeds
from support.grouped import MODES, Grouped, exact, rows_of, scale_shapes


def grouped_scaled_mm_nt(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw a grouped product; where rows of no group are in given memory, nothing may be written to them."""
    groups, rows = draw(st.integers(0, 4)), draw(st.integers(0, 9))
    n, k = draw(st.sampled_from((1, 3, 16, 100, 130, 0))), draw(st.sampled_from((1, 7, 64, 128, 129, 200, 0)))
    mode = draw(st.sampled_from(MODES))
    ends = np.array(draw(st.lists(st.integers(-2, 12), min_size=groups, max_size=groups)), np.int32)
    a, b = (codes(shape, "float8_e4m3fn", "ordinary", draw(seeds)) for shape in ((rows, k), (groups, n, k)))
    scale_a, scale_b = (scales(shape, draw(seeds)) for shape in scale_shapes(mode, groups, rows, n, k))
    out = draw(st.sampled_from(("bfloat16", "float16", "float32")))
    options: dict[str, Any] = {"out_dtype": out, "use_fast_accum": draw(st.booleans())}
    bias = numbers((groups, n), draw(st.sampled_from((out, "float32"))), "ordinary", 7) if draw(st.booleans()) else None
    if bias is not None:
        options["bias"] = arena.put(bias, draw(layouts))
    of = Grouped(a, b, scale_a, scale_b)
    added = None if bias is None else abs(bias)
    right, magnitude = exact(of, mode, ends, bias), exact(of.absolute(), mode, ends, added)
    parts = rows_of(ends, rows)
    given, filled = draw(st.booleans()), parts[-1].stop if parts else 0
    written = ()
    if given:
        place = options["out"] = arena.put(converted(np.full((rows, n), 77.0), out), draw(layouts))
        written = (place._replace(shape=(filled, n)),)

    def check(result: Any) -> None:
        got = engine.numpy(result)
        assert got.shape == (rows, n)
        bounded(np.ascontiguousarray(got)[:filled], right[:filled], magnitude[:filled], out)

    places = arena.put(a, draw(layouts)), arena.put(b, draw(layouts)), arena.put(scale_a, draw(offsets))
    options["offs"] = arena.put(ends, draw(offsets))
    places = *places, arena.put(scale_b, draw(layouts))
    names = ("a", "weight", "scale_a", "scale_b")
    return Case(fp8core.grouped_scaled_mm_nt, places, options, check, written, "answer", names)
