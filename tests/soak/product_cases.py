"""Right calls of the products and of linear layers, and pairs of scales of which some have to be refused."""

from typing import Any, NamedTuple

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, w8a8
from soak.arena import Arena, Layout
from soak.strategies import Case, Draw, codes, converted, layouts, numbers, offsets, scales, seeds
from support import reference

KS = (1, 7, 16, 64, 100, 128, 129, 200, 256, 300)
NS = (1, 3, 8, 16, 100, 128, 130, 256)
ROUNDING = {
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float32": 2.0**-24,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
"""Half of the distance of neighbours, relative to a power of two: the most that rounding changes a normal number."""
SUBNORMAL = {"float16": 2.0**-25, "float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}
"""Half of the distance of subnormal neighbours, where products may be subnormal."""
ACCUMULATED = 2.0**-8
"""What an accumulation with fewer bits may lose, of the sum of magnitudes.

Hopper cuts each of a block's 128 terms off at 2**-13 of their sum: by half of that at the mean, and half as much while
the sum grows. Terms of one sign lose it all; 1.2e-3 was seen.
"""


class Scale(NamedTuple):
    """A scale of one operand: its shape, whether it is of 128s along k, and what spreads it over the matrix."""

    shape: tuple[int, ...]
    grouped: bool
    group: tuple[int, int]


def _scale_of_a(kind: str, m: int, k: int) -> Scale:
    return {
        "tensor": Scale((1,), False, (-1, -1)),
        "0-d": Scale((), False, (-1, -1)),
        "1x1": Scale((1, 1), False, (-1, -1)),
        "row": Scale((m, 1), False, (1, -1)),
        "flat row": Scale((m,), False, (1, -1)),
        "group": Scale((m, -(-k // 128)), True, (1, 128)),
    }[kind]


def _scale_of_b(kind: str, n: int, k: int) -> Scale:
    if kind == "block":
        return Scale((-(-n // 128), -(-k // 128)), True, (128, 128))
    return _scale_of_a(kind, n, k)


def bounded(got: np.ndarray, exact: np.ndarray, magnitude: np.ndarray, out: str, out_scale: float = 1.0) -> None:
    """Assert that a product is ``exact`` within its format's rounding and what the accumulation may lose."""
    wide = got.astype(np.float64) * out_scale
    if out in reference.MAX:
        exact = np.clip(exact, -reference.MAX[out] * out_scale, reference.MAX[out] * out_scale)
    least = SUBNORMAL.get(out, 0.0) * out_scale
    with np.errstate(all="ignore"):
        room = ROUNDING[out] * np.abs(exact) + least + ACCUMULATED * magnitude
        room[np.abs(exact) > 6e4] = np.inf if out == "float16" else room[np.abs(exact) > 6e4]
        wrong = np.argwhere(~(np.abs(wide - exact) <= room))
    if len(wrong):
        at = tuple(wrong[0])
        raise AssertionError(f"{len(wrong)} of {exact.size} are wrong, first at {at}: {wide[at]}, not {exact[at]}")


class _Operands(NamedTuple):
    exact: np.ndarray
    magnitude: np.ndarray


def _product_of(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None) -> _Operands:
    """Return the exact product of dequantized matrices [m, k] and [n, k]."""
    added = 0 if bias is None else bias.astype(np.float64)
    return _Operands(a @ b.T + added, np.abs(a) @ np.abs(b).T + np.abs(added))


def _spread(values: np.ndarray, scale: Scale, shape: tuple[int, int]) -> np.ndarray:
    rows, cols = shape
    counts = [1 if s < 0 else -(-e // s) for s, e in zip(scale.group, shape, strict=True)]
    return reference.spread(values.reshape(counts), scale.group, (rows, cols)).reshape(shape).astype(np.float64)


def scaled_mm(draw: Draw, arena: Arena, engine: Any, *, stored: bool = True) -> Case:
    """Draw a product, now and then of scales that do not go together."""
    m, n, k = draw(st.integers(0, 5)), draw(st.sampled_from((*NS, 0))), draw(st.sampled_from((*KS, 0)))
    leading = (m,) if draw(st.booleans()) else (1, m)
    of_a = _scale_of_a(draw(st.sampled_from(("tensor", "0-d", "1x1", "row", "flat row", "group", "group"))), m, k)
    of_b = _scale_of_b(draw(st.sampled_from(("tensor", "1x1", "row", "flat row", "group", "block", "block"))), n, k)
    # Beside scales of a per token [n, 1] is one a channel, also where blocks of b [k, n] have that shape.
    assume(stored or of_a.grouped or not of_b.grouped or of_b.shape != (1, n))
    a_dtype, b_dtype = draw(st.sampled_from((("float8_e4m3fn",) * 2, ("float8_e4m3fn", "float8_e5m2"))))
    a, b = codes((m, k), a_dtype, "ordinary", draw(seeds)), codes((n, k), b_dtype, "ordinary", draw(seeds))
    scale_a, scale_b = scales(of_a.shape, draw(seeds)), scales(of_b.shape, draw(seeds))
    if not stored and scale_b.ndim == 2:
        argument_b = arena.put(scale_b.T, Layout("turned") if draw(st.booleans()) else draw(offsets))
    else:
        argument_b = arena.put(scale_b, draw(offsets))
    out = draw(st.sampled_from(("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")))
    options: dict[str, Any] = {"out_dtype": out, "use_fast_accum": draw(st.booleans())}
    options["batch_invariant"] = draw(st.booleans())
    bias, out_scale = None, 1.0
    if draw(st.booleans()):
        bias = numbers((n,), "float32" if out in reference.MAX or draw(st.booleans()) else out, "ordinary", 7)
        options["bias"] = arena.put(bias, draw(offsets))
    if out in reference.MAX:
        out_scale = 0.5
        options["out_scale"] = arena.put(np.full(1, out_scale, np.float32)) if draw(st.booleans()) else out_scale
    spread_a, spread_b = _spread(scale_a, of_a, (m, k)), _spread(scale_b, of_b, (n, k))
    want = _product_of(a.astype(np.float64) * spread_a, b.astype(np.float64) * spread_b, bias)
    written, amax = [], None
    if draw(st.booleans()):
        options["out"] = arena.put(converted(np.full((*leading, n), 77.0), out), draw(layouts))
        written.append(options["out"])
    if draw(st.booleans()):
        amax = options["amax"] = arena.put(np.full(1, -5.0, np.float32), draw(offsets))
        written.append(amax)

    def check(result: Any) -> None:
        got = engine.numpy(result)
        assert got.shape == (*leading, n)
        bounded(np.ascontiguousarray(got).reshape(m, n), want.exact, want.magnitude, out, out_scale)
        if amax is not None:
            largest = np.abs(want.exact).max(initial=0.0)
            found, room = arena.values(amax)[0], 2e-3 * want.magnitude.max(initial=0.0)
            assert abs(found - largest) <= room, f"amax of {m} x {n} is {found}, not {largest}"

    alike = of_a.grouped == of_b.grouped or k <= 128 or min(m, n) <= 1
    must = "refuse" if not alike and k else None if of_a.grouped != of_b.grouped else "answer"
    if amax is not None and m * n == 0:
        must = None  # written or refused
    weight = arena.put(b, draw(layouts)) if stored else arena.put(b.T, Layout("turned", draw(st.sampled_from((0, 8)))))
    places = arena.put(a.reshape(*leading, k), draw(layouts)), weight, arena.put(scale_a, draw(offsets)), argument_b
    function = fp8core.scaled_mm_nt if stored else fp8core.scaled_mm
    return Case(function, places, options, check, tuple(written), must, ("a", "b", "weight", "scale_a", "scale_b"))


def scaled_mm_kn(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw a product of b as [k, n]."""
    return scaled_mm(draw, arena, engine, stored=False)


LINEARS = {
    "channel": (PER_CHANNEL, PER_TOKEN),
    "tensor": (PER_TENSOR, PER_TENSOR),
    "mixed": (PER_TENSOR, PER_TOKEN),
    "block": (BLOCK_128, GROUP_128),
    "channel of tensor": (PER_CHANNEL, PER_TENSOR),
}


def linear(draw: Draw, arena: Arena, engine: Any, *, form: str = "function") -> Case:
    """Draw a linear layer's call: its input quantized by us or by the caller, scales given or computed."""
    m, n, k = draw(st.integers(0, 5)), draw(st.sampled_from(NS)), draw(st.sampled_from(KS))
    weight_group, group = LINEARS["channel" if form == "op" else draw(st.sampled_from(tuple(LINEARS)))]
    dtype = draw(st.sampled_from(("bfloat16", "float16", "float32")))
    x, weight = numbers((m, k), dtype, "ordinary", draw(seeds)), numbers((n, k), "float32", "ordinary", draw(seeds))
    w = reference.quantize(weight, group_shape=weight_group)
    decoded = reference.dequantize(w.codes, "float8_e4m3fn", w.scale, weight_group).astype(np.float64)
    options: dict[str, Any] = {}
    given, bias = None, None
    if draw(st.booleans()) and tuple(group) == (-1, -1):
        given = scales((1,), draw(seeds))
        options["input_scale"] = arena.put(given) if draw(st.booleans()) else float(given[0])
    q = reference.quantize(x, group_shape=group, scale=given)
    a = reference.dequantize(q.codes, "float8_e4m3fn", q.scale, group).astype(np.float64)
    if draw(st.booleans()):
        bias = numbers((n,), draw(st.sampled_from((dtype, "float32"))), "ordinary", 9)
        options["bias"] = arena.put(bias, draw(offsets))
    want = _product_of(a, decoded, bias)
    native = w.codes.view(codes((1,), "float8_e4m3fn", "zeros", 0).dtype)
    scale = arena.put(w.scale.reshape(1) if tuple(weight_group) == (-1, -1) else w.scale, draw(offsets))
    shape = (1, m, k) if draw(st.booleans()) else (m, k)
    x_at = arena.put(x.reshape(shape), draw(layouts))
    written = []
    if form == "op":
        options["use_per_token_if_dynamic"] = True
        weight_at = arena.put(native.T, Layout("turned"))
        names = "input", "x", "weight", "weight_scale", "b", "scale_b"
        function: Any = w8a8.Fp8LinearOp().apply
    else:
        weight_at, names = arena.put(native, draw(layouts)), ("x", "weight", "weight_scale", "a", "scale_a", "scale_b")
        function = fp8core.linear
        if draw(st.booleans()):
            options["out"] = arena.put(converted(np.full((*shape[:-1], n), 77.0), dtype), draw(layouts))
            written.append(options["out"])
        options["group_shape"] = group
    if form == "layer":
        function = _as_layer

    def check(result: Any) -> None:
        got = np.ascontiguousarray(engine.numpy(result))
        assert got.shape == (*shape[:-1], n)
        assert got.dtype == x.dtype
        bounded(got.reshape(m, n), want.exact, want.magnitude, dtype)

    return Case(function, (x_at, weight_at, scale), options, check, tuple(written), "answer", names)


def _as_layer(x: Any, weight: Any, scale: Any, *, out: Any = None, **options: Any) -> Any:
    return fp8core.Fp8Linear(weight, scale, **options)(x, out=out)


def layer(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw the first call of an Fp8Linear."""
    return linear(draw, arena, engine, form="layer")


def linear_op(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw a call of vLLM's linear layer."""
    return linear(draw, arena, engine, form="op")


def cutlass_w8a8_scaled_mm(draw: Draw, arena: Arena, engine: Any) -> Case:
    """Draw one of vLLM's named products, with padding rows."""
    m, n, k = draw(st.integers(0, 5)), draw(st.sampled_from(NS)), draw(st.sampled_from(KS))
    padded = m + draw(st.sampled_from((0, 3) if m else (0,)))  # torch does not tell where no rows lie
    a, b = (codes(s, "float8_e4m3fn", "ordinary", draw(seeds)) for s in ((padded, k), (n, k)))
    of_a = _scale_of_a(draw(st.sampled_from(("tensor", "row"))), padded, k)
    of_b = _scale_of_a(draw(st.sampled_from(("tensor", "row", "flat row"))), n, k)
    scale_a, scale_b = scales(of_a.shape, draw(seeds)), scales(of_b.shape, draw(seeds))
    spread_a, spread_b = _spread(scale_a, of_a, (padded, k))[:m], _spread(scale_b, of_b, (n, k))
    want = _product_of(a[:m].astype(np.float64) * spread_a, b.astype(np.float64) * spread_b, None)
    options = {
        "qinput": arena.put(a, draw(layouts)),
        "weight": arena.put(b.T, Layout("turned")),
        "out_dtype": "bfloat16",
        "scale_a": arena.put(scale_a),
        "scale_b": arena.put(scale_b),
        "bias": None,
        "output_shape": (m, n),
        "input_2d": None,
    }

    def check(result: Any) -> None:
        bounded(np.ascontiguousarray(engine.numpy(result)), want.exact, want.magnitude, "bfloat16")

    names = ("w8a8", *(f"{kind}_w8a8_scaled_mm" for kind in ("cutlass", "torch_per_token", "rocm_per_tensor")))
    function = getattr(w8a8, draw(st.sampled_from(names[1:])))
    return Case(function, (), options, check, (), "answer", ("a", "b"))
