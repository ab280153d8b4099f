"""Right calls of quantize, dequantize and the fused producers, with their right answers."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

import fp8core
from fp8core import PER_TENSOR, PER_TOKEN, w8a8
from soak.arena import Arena
from soak.strategies import (
    Case,
    Draw,
    codes,
    converted,
    flat,
    flavours,
    fp8,
    grid,
    groups,
    layouts,
    numbers,
    offsets,
    same,
    scale_shape,
    scales,
    seeds,
    shapes,
    wide,
)
from support import reference


def _outs(draw: Draw, arena: Arena, shape: tuple[int, ...], dtype: str, of_scales: tuple[Any, str] | None):
    """Draw where results go: nowhere, data, or data and scale."""
    kinds = ("none", "data") if of_scales is None or of_scales[0] is None else ("none", "data", "both", "scale")
    kind = draw(st.sampled_from(kinds))
    data = scale = None
    if kind in ("data", "both"):
        data = arena.put(codes(shape, dtype, "special", 1), draw(layouts))
    if kind in ("both", "scale"):
        scale = arena.put(converted(scales(of_scales[0], 2), of_scales[1]), draw(offsets))
    out = data if kind in ("none", "data") else (data, scale)
    return out, tuple(place for place in (data, scale) if place is not None)


def _checked(engine: Any, result: Any, want: reference.Quantized, shape, group, dtype, of_scale) -> None:
    same(engine.codes(result.data), want.codes.reshape(shape), "data")
    assert str(result.data.dtype).removeprefix("torch.") == dtype
    if of_scale is None:
        return
    got = np.ascontiguousarray(engine.numpy(result.scale))
    assert str(got.dtype) == of_scale
    shaped = scale_shape(group, shape)
    if shaped is not None:
        assert got.shape == shaped, f"scale has shape {got.shape}, not {shaped}"
    raw = got.view(np.uint8) if of_scale != "float32" else got
    if 0 in shape[:-2] and tuple(group) != tuple(PER_TENSOR):  # matrices, of which there are none
        assert not raw.size
        return
    assert raw.size == want.scale.size, f"{raw.size} scales, not {want.scale.size}"
    same(raw.reshape(-1), want.scale.reshape(-1), "scale")


def given_scale(draw: Draw, arena: Arena, group: tuple[int, int], rows: int, cols: int) -> tuple[Any, np.ndarray, Any]:
    """Draw a given scale: the argument, one value a group, and the group shape that it means."""
    wanted = grid(group, rows, cols)
    kind = draw(st.sampled_from(("number", "numpy number", "one", "all", "all")))
    value = float(draw(st.sampled_from((0.5, 0.037, 1.0, 3.0))))
    if kind == "number":
        return value, np.float32(value).reshape(1, 1), PER_TENSOR
    if kind == "numpy number":
        return np.float32(value), np.float32(value).reshape(1, 1), PER_TENSOR
    if kind == "one":
        values = scales(draw(st.sampled_from(((), (1,), (1, 1)))), draw(seeds))
        return arena.put(values, draw(offsets)), values.reshape(1, 1), PER_TENSOR
    values = scales((1,) if tuple(group) == (-1, -1) else wanted, draw(seeds))
    return arena.put(values, draw(offsets)), values.reshape(wanted), PER_TENSOR if values.size == 1 else group


def quantize(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw a call of quantize."""
    shape, dtype, group = draw(shapes()), draw(fp8), draw(groups)
    x = numbers(shape, draw(wide), draw(flavours), draw(seeds))
    rows, cols = flat(shape)
    options: dict[str, Any] = {"dtype": dtype, "group_shape": group}
    naive: dict[str, Any] = {}
    where = arena.put(x, draw(layouts))
    of_scales = "float32"
    padded = None
    if len(shape) == 2 and draw(st.booleans()):
        padded = options["rows_padded"] = naive["rows_padded"] = draw(st.integers(0, rows + 5))
    out_shape = shape if padded is None else (max(padded, rows), cols)
    if draw(st.integers(0, 2)) == 0:
        argument, values, meant = given_scale(draw, arena, group, *flat(out_shape))
        options["scale"], naive["scale"], group, of_scales = argument, values, meant, None
    else:
        options["scale_format"] = draw(st.sampled_from(("float32", "ue8m0", "ue8m0_bytes")))
        naive["scale_format"] = options["scale_format"]
        of_scales = "float8_e8m0fnu" if options["scale_format"] == "ue8m0_bytes" else "float32"
        if tuple(group) == tuple(PER_TOKEN) and draw(st.booleans()):
            options["scale_ub"] = naive["scale_ub"] = draw(st.sampled_from((0.5, 1.5, 100.0)))
        elif tuple(group) not in (tuple(PER_TOKEN), tuple(PER_TENSOR)) and draw(st.booleans()):
            options["eps"] = naive["eps"] = draw(st.sampled_from((1e-10, 1e-3, 1)))
    shaped = None if of_scales is None else scale_shape(group, out_shape)
    options["out"], written = _outs(draw, arena, out_shape, dtype, None if shaped is None else (shaped, of_scales))
    if of_scales is not None and not isinstance(options["out"], tuple):  # given scales lie in rows
        options["scale_layout"] = draw(st.sampled_from(("k", "mn")))
    want = reference.quantize(x.reshape(rows, cols), dtype, group, **naive)

    def check(result: Any) -> None:
        _checked(engine, result, want, out_shape, group, dtype, of_scales)

    must = "refuse" if crosses(group, shape) else "answer"
    return Case(fp8core.quantize, (where,), options, check, written, must, ("x", "group_shape"))


def crosses(group: tuple[int, int], shape: tuple[int, ...]) -> bool:
    """Return whether groups of several rows lie in more than one matrix of the last two axes."""
    if len(shape) < 3 or group[0] == 1 or tuple(group) == tuple(PER_TENSOR):
        return False
    return flat(shape[:-1])[0] > 1 and (group[0] < 0 or shape[-2] % group[0] != 0)


def scaled_fp8_quant(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw a call of vLLM's name for quantize."""
    rows, cols = shape = draw(shapes(2, 2))
    x = numbers(shape, draw(wide), draw(flavours), draw(seeds))
    where, padded, per_token = arena.put(x, draw(layouts)), draw(st.sampled_from((None, 0, rows + 3))), False
    options: dict[str, Any] = {"num_token_padding": padded}
    naive: dict[str, Any] = {"rows_padded": padded}
    if draw(st.booleans()):
        values = scales(draw(st.sampled_from(((), (1,), (1, 1)))), draw(seeds))
        number = draw(st.booleans())
        options["scale"] = float(values.reshape(-1)[0]) if number else arena.put(values)
        naive["scale"], of_scales = values.reshape(1, 1), None
    else:
        per_token = options["use_per_token_if_dynamic"] = draw(st.booleans())
        bound = options["scale_ub"] = draw(st.sampled_from((None, 1.25)))
        naive["scale_ub"], of_scales = bound if per_token else None, "float32"
    group = PER_TOKEN if per_token else PER_TENSOR
    out_shape = (max(padded or 0, rows), cols)
    dtype = "float8_e4m3fn"
    out, written = _outs(draw, arena, out_shape, dtype, None)
    want = reference.quantize(x, dtype, group, **naive)

    def check(result: Any) -> None:
        _checked(engine, _Pair(*result), want, out_shape, group, dtype, of_scales)

    return Case(w8a8.scaled_fp8_quant, (where,), {**options, "output": out}, check, written, "answer", ("input", "x"))


class _Pair:
    def __init__(self, data: Any, scale: Any) -> None:
        self.data, self.scale = data, scale


def dequantize(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw a call of dequantize, with its groups said or not."""
    shape, dtype, group = draw(shapes(1, 3)), draw(fp8), draw(groups)
    rows, cols = flat(shape)
    q = codes(shape, dtype, draw(flavours), draw(seeds))
    where, out_dtype = arena.put(q, draw(layouts)), draw(wide)
    argument, values, meant = given_scale(draw, arena, group, rows, cols)
    options: dict[str, Any] = {"dtype": out_dtype, "out": None}
    said = draw(st.booleans())
    if said:
        options["group_shape"] = group
    clear = all(n in (1, extent) for n, extent in zip(values.shape, (rows, cols), strict=True))
    must = "answer" if said or clear or values.size == 1 else None if 0 in shape else "refuse"
    if len(shape) > 2 and values.size != 1:
        must = None if must == "answer" else must
    if draw(st.booleans()):
        options["out"] = arena.put(numbers(shape, out_dtype, "special", 3), draw(layouts))
    with np.errstate(all="ignore"):
        wide_q = reference.decode(q.view(np.uint8).reshape(rows, cols), dtype)
        exact = wide_q * reference.spread(values, meant, (rows, cols)).reshape(rows, cols)
    want = converted(exact.astype(np.float32), out_dtype).reshape(shape)

    def check(result: Any) -> None:
        same(np.ascontiguousarray(engine.numpy(result)), want, "result")

    written = () if options["out"] is None else (options["out"],)
    return Case(fp8core.dequantize, (where, argument), options, check, written, must, ("q", "scale", "group_shape"))


def near(got: Any, exact: np.ndarray, engine: Any, options: dict[str, Any], given: float | None) -> None:
    """Assert that scales and codes are those of ``exact`` within the last bits of fp32 and half a step of the format."""
    rows, cols = exact.shape
    dtype, group = options["dtype"], options["group_shape"]
    scale = np.ascontiguousarray(engine.numpy(got.scale))
    decoded = reference.decode(engine.codes(got.data).reshape(rows, cols), dtype).astype(np.float64)
    if given is None:
        wide_scale = scale.astype(np.float32).reshape(grid(group, rows, cols))
        naive = {k: options[k] for k in ("scale_ub",) if k in options}
        least = reference.quantize(exact.astype(np.float32), dtype, group, **naive).scale
        ratio = wide_scale / least
        most = 1 + 2e-6 if options.get("scale_format", "float32") == "float32" else 2 * (1 + 2e-6)
        assert ((ratio > 1 - 2e-6) & (ratio < most)).all(), f"scales are off by {ratio.min()} to {ratio.max()}"
    else:
        wide_scale = np.full((1, 1), given, np.float32)
        group = PER_TENSOR
    spread = reference.spread(wide_scale, group, (rows, cols)).astype(np.float64).reshape(rows, cols)
    steps = 2.0**-3 if "e4m3" in dtype else 2.0**-2
    least_step = reference.value_of(1, dtype)
    scaled = np.clip(exact / spread, -reference.MAX[dtype], reference.MAX[dtype])
    room = np.maximum(np.abs(scaled) * steps, least_step) / 2 * (1 + 1e-5) + 1e-5 * np.abs(scaled)
    assert (np.abs(decoded - scaled) <= room).all(), "codes are not the nearest"


def _producer_options(draw: Draw, arena: Arena) -> tuple[dict[str, Any], float | None]:
    options: dict[str, Any] = {"dtype": draw(fp8)}
    given = None
    kind = draw(st.sampled_from(("static", "token", "group")))
    options["group_shape"] = {"static": PER_TENSOR, "token": PER_TOKEN, "group": (1, 128)}[kind]
    if kind == "static":
        given = draw(st.sampled_from((0.5, 0.0625)))
        as_array = draw(st.booleans())
        options["scale"] = arena.put(np.full(1, given, np.float32), draw(offsets)) if as_array else given
    else:
        options["scale_format"] = draw(st.sampled_from(("float32", "ue8m0")))
        if kind == "token" and draw(st.booleans()):
            options["scale_ub"] = 2.5
    return options, given


def silu_and_mul_quant(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw a call of the gated activation."""
    rows, half = draw(st.integers(0, 5)), draw(st.sampled_from((1, 7, 8, 64, 100, 128, 130, 256)))
    x = numbers((rows, 2 * half), draw(wide), "ordinary", draw(seeds))
    where = arena.put(x, draw(layouts))
    options, given = _producer_options(draw, arena)
    exact = reference.silu(x[:, :half].astype(np.float32)) * x[:, half:].astype(np.float64)
    options["out"], written = _outs(draw, arena, (rows, half), options["dtype"], None)

    def check(result: Any) -> None:
        near(result, exact, engine, options, given)

    return Case(fp8core.silu_and_mul_quant, (where,), options, check, written, "answer", ("x",))


def rms_norm_quant(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw a call of the norm, with or without a residual, which is checked as well."""
    rows, cols = draw(st.integers(0, 5)), draw(st.sampled_from((1, 7, 8, 64, 100, 128, 130, 256)))
    dtype = draw(wide)
    x, weight = numbers((rows, cols), dtype, "ordinary", draw(seeds)), numbers((cols,), draw(wide), "ordinary", 5)
    places = arena.put(x, draw(layouts)), arena.put(weight, draw(offsets))
    options, given = _producer_options(draw, arena)
    exact, stored, written = x.astype(np.float64), None, ()
    if draw(st.booleans()):
        other = numbers((rows, cols), dtype, "ordinary", draw(seeds))
        total = x.astype(np.float32) + other.astype(np.float32)
        options["residual"] = arena.put(other, draw(layouts))
        exact, stored, written = total.astype(np.float64), converted(total, dtype), (options["residual"],)
    exact = reference.rms_norm(exact, weight, 1e-3)
    options["out"], more = _outs(draw, arena, (rows, cols), options["dtype"], None)

    def check(result: Any) -> None:
        near(result, exact, engine, options, given)
        if stored is not None:
            same(arena.values(options["residual"]), stored, "residual")

    names = "x", "weight", "epsilon"
    return Case(fp8core.rms_norm_quant, (*places, 1e-3), options, check, (*written, *more), "answer", names)
