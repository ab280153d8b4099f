"""Right calls of the weight functions."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

import fp8core
from fp8core import w8a8
from soak.arena import Arena
from soak.strategies import Case, Draw, codes, e4m3, fp8, layouts, offsets, same, scales, seeds
from support import reference

UNSET = np.float32(np.finfo(np.float32).min)
TO_FNUZ = np.array([reference.fn_to_fnuz(code) for code in range(256)], np.uint8)
TO_FN = np.array([reference.fnuz_to_fn(code) for code in range(256)], np.uint8)


def _shards(draw: Draw) -> tuple[list[int], np.ndarray]:
    widths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    count = draw(st.sampled_from((1, len(widths))))
    values = scales(draw(st.sampled_from(((), (1,), (1, 1)))) if count == 1 else (count,), draw(seeds))
    if count > 1 and draw(st.integers(0, 4)) == 0:
        values[1:] = UNSET
    return widths, values


def requantize_with_max_scale(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw shards and their scales, in place or not."""
    widths, values = _shards(draw)
    dtype = draw(fp8)
    weight = codes((sum(widths), draw(st.sampled_from((1, 8, 17, 64)))), dtype, "ordinary", draw(seeds))
    place = arena.put(weight, draw(layouts))
    out = arena.put(codes(weight.shape, dtype, "special", 1), draw(layouts)) if draw(st.booleans()) else None
    scale, want = reference.requantize(weight.view(np.uint8), dtype, values, widths)

    def check(result: Any) -> None:
        same(np.asarray(engine.numpy(result[0])), np.float32(scale), "max_scale")
        same(engine.codes(result[1]), want, "weight")
        same(arena.values(place if out is None else out).view(np.uint8), want, "memory")

    args = place, arena.put(values, draw(offsets)), widths
    names = "weight", "weight_scale", "logical_widths"
    written = (place if out is None else out,)
    return Case(fp8core.requantize_with_max_scale, args, {"out": out}, check, written, "answer", names)


def convert_to_channelwise(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw shards and their scales."""
    widths, values = _shards(draw)
    want = reference.expand(values, widths)

    def check(result: Any) -> None:
        same(np.asarray(engine.numpy(result)), want, "scales")

    args = arena.put(values, draw(offsets)), widths
    names = "weight_scale", "logical_widths"
    return Case(fp8core.convert_to_channelwise, args, {}, check, (), "answer", names)


def normalize(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw a conversion between the two E4M3, in place or not."""
    old = draw(e4m3)
    to_fnuz = old == "float8_e4m3fn"
    shape = draw(st.sampled_from(((0,), (3,), (16, 16), (2, 3, 5), ())))
    weight = codes(shape, old, "special", draw(seeds))
    place, values = arena.put(weight, draw(offsets)), scales(draw(st.sampled_from(((), (1,), (5, 1)))), draw(seeds))
    of_input = draw(st.sampled_from((None, (), (1,))))
    factor = np.float32(2 if to_fnuz else 0.5)
    out = None
    kind = draw(st.sampled_from(("new", "in place", "out")))
    if kind != "new":
        out = place if kind == "in place" else arena.put(codes(shape, old, "special", 3), draw(offsets))
    given = None if of_input is None else arena.put(scales(of_input, 4))
    want = (TO_FNUZ if to_fnuz else TO_FN)[weight.view(np.uint8)]

    def check(result: Any) -> None:
        same(engine.codes(result[0]).reshape(shape), want, "weight")
        same(np.asarray(engine.numpy(result[1])), values * factor, "weight_scale")
        if of_input is None:
            assert result[2] is None
        else:
            same(np.asarray(engine.numpy(result[2])), scales(of_input, 4) * factor, "input_scale")

    function = fp8core.normalize_e4m3fn_to_e4m3fnuz if to_fnuz else fp8core.normalize_e4m3fnuz_to_e4m3fn
    args = place, arena.put(values, draw(offsets)), given
    names = "weight", "weight_scale", "input_scale"
    return Case(function, args, {"out": out}, check, () if out is None else (out,), "answer", names)


def all_close_1d(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw scales that are close, or not, or hold a NaN."""
    values = np.full(draw(st.integers(0, 300)), 0.37, np.float32)
    if values.size and draw(st.booleans()):
        values[draw(st.integers(0, values.size - 1))] *= np.float32(draw(st.sampled_from((1 + 1e-6, 1 + 1e-4, np.nan))))
    first = values[:1].astype(np.float64)
    want = bool((np.abs(values.astype(np.float64) - first) <= 1e-5 * np.abs(first)).all())

    def check(result: Any) -> None:
        assert result is want

    return Case(fp8core.all_close_1d, (arena.put(values, draw(offsets)),), {}, check, (), "answer", ("x",))


def per_tensor_dequantize(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw codes and one number, an array or a plain one."""
    dtype = draw(fp8)
    q = codes((draw(st.integers(0, 4)), draw(st.sampled_from((1, 17, 64)))), dtype, "ordinary", draw(seeds))
    number = draw(st.sampled_from((0.5, 1e-5, 3)))
    scale = draw(st.sampled_from(("number", (), (1,), (1, 1))))
    argument = number if scale == "number" else arena.put(np.full(scale, number, np.float32))
    want = (q.astype(np.float32) * np.float32(number)).astype(np.float16)

    def check(result: Any) -> None:
        same(np.ascontiguousarray(engine.numpy(result)), want, "result")

    function = draw(st.sampled_from((fp8core.per_tensor_dequantize, w8a8.per_tensor_dequantize)))
    return Case(function, (arena.put(q, draw(layouts)), argument), {}, check, (), "answer", ("q", "scale"))
