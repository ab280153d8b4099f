"""What is called again and again: operations over shapes, dtypes and groups, each with its answers."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN
from soak.arena import POISON, Place, numpy_dtype
from soak.machines import Machine
from soak.product_cases import bounded
from support import reference
from support.engines import FLOATS, assert_same_bytes
from support.grouped import Grouped, ends_of, exact, operands
from support.moe import choices, placed, summed

GUARD = 512
NATIVE = numpy_dtype("float8_e4m3fn")
VARIANTS = 3
"""Inputs of each work, so that a result that was left over from another call is a wrong one."""


class Placing(NamedTuple):
    """Where input and results begin, in elements off an aligned address, and the elements between rows of results."""

    of_x: int = 0
    of_out: int | None = None
    """None: the library allocates."""
    gap: int = 0


PLACINGS = (
    Placing(),
    Placing(0, 0),
    Placing(4, 0),
    Placing(0, 4),
    Placing(4, 4),
    Placing(1, 1),
    Placing(0, 0, 16),
    Placing(8, 3, 5),
)


class Work(NamedTuple):
    """An operation on one input: `call` takes operands, where results go (or None) and options as a stream."""

    name: str
    inputs: tuple[Mapping[str, np.ndarray], ...]
    """By operand; "x" is the one that is placed."""
    outs: tuple[tuple[tuple[int, ...], str], ...]
    call: Callable[..., tuple[Any, ...]]
    check: Callable[[Mapping[str, np.ndarray], list[np.ndarray]], None]
    """Compares results with the naive oracle, once."""


def _values(seed: tuple[int, ...], shape: tuple[int, ...], dtype: str = "bfloat16") -> np.ndarray:
    rng = np.random.default_rng(seed)
    away_from_zero = np.sign(rng.standard_normal(shape)) * rng.uniform(0.1, 2.0, shape)  # no code is -0
    return (away_from_zero * np.exp2(rng.integers(-2, 3, (*shape[:-1], 1)))).astype(np.float32).astype(FLOATS[dtype])


@cache
def _quantized(rows: int, k: int, i: int, group: tuple[int, int]) -> tuple[np.ndarray, reference.Quantized]:
    """Return values and what the naive oracle quantizes them to, which takes its time."""
    x = _values((rows, k, i), (rows, k))
    return x, reference.quantize(x, group_shape=group)


def quantization(m: int, k: int, group: tuple[int, int], dtype: str, x_dtype: str, layout: str = "k") -> Work:
    """Return a dynamic quantization."""
    inputs = tuple({"x": _values((m, k, i), (m, k), x_dtype)} for i in range(VARIANTS))
    shape = (
        (1,)
        if tuple(group) == (-1, -1)
        else tuple(1 if g < 0 else -(-e // g) for g, e in zip(group, (m, k), strict=True))
    )

    def call(o: Mapping[str, Any], outs: tuple[Any, ...] | None, **options: Any) -> tuple[Any, ...]:
        q = fp8core.quantize(o["x"], group_shape=group, dtype=dtype, scale_layout=layout, out=outs, **options)
        return q.data, q.scale

    def check(o: Mapping[str, np.ndarray], got: list[np.ndarray]) -> None:
        want = reference.quantize(o["x"], dtype, group)
        assert_same_bytes(got[0].view(np.uint8), want.codes)
        assert_same_bytes(got[1].reshape(-1), want.scale.reshape(-1))

    return Work(f"quantize {m}x{k} {tuple(group)} {dtype}", inputs, (((m, k), dtype), (shape, "float32")), call, check)


def dequantization(m: int, k: int, group: tuple[int, int]) -> Work:
    """Return a dequantization of codes and their scales."""
    inputs = []
    for i in range(VARIANTS):
        q = reference.quantize(_values((m, k, i, 1), (m, k)), "float8_e4m3fn", group)
        inputs.append({"x": q.codes.view(NATIVE), "scale": q.scale})

    def call(o: Mapping[str, Any], outs: tuple[Any, ...] | None, **options: Any) -> tuple[Any, ...]:
        out = None if outs is None else outs[0]
        return (fp8core.dequantize(o["x"], o["scale"], group_shape=group, dtype="float16", out=out, **options),)

    def check(o: Mapping[str, np.ndarray], got: list[np.ndarray]) -> None:
        exact = reference.dequantize(o["x"].view(np.uint8), "float8_e4m3fn", o["scale"], group)
        assert_same_bytes(got[0], exact.astype(np.float16))

    return Work(f"dequantize {m}x{k} {tuple(group)}", tuple(inputs), (((m, k), "float16"),), call, check)


def producer(m: int, k: int, group: tuple[int, int], *, norm: bool) -> Work:
    """Return a fused producer; its answers come from the host engine's table, which the oracle checks."""
    inputs = []
    for i in range(VARIANTS):
        operands = {"x": _values((m, k, i, 2), (m, k if norm else 2 * k))}
        inputs.append(operands | ({"weight": _values((k, i), (k,))} if norm else {}))

    def call(o: Mapping[str, Any], outs: tuple[Any, ...] | None, **options: Any) -> tuple[Any, ...]:
        if norm:
            q = fp8core.rms_norm_quant(o["x"], o["weight"], 1e-5, group_shape=group, out=outs, **options)
        else:
            q = fp8core.silu_and_mul_quant(o["x"], group_shape=group, out=outs, **options)
        return q.data, q.scale

    def check(o: Mapping[str, np.ndarray], got: list[np.ndarray]) -> None:
        if norm:
            exact = reference.rms_norm(o["x"], o["weight"], 1e-5)
        else:
            exact = reference.silu(o["x"][:, :k].astype(np.float32)) * o["x"][:, k:].astype(np.float64)
        back = reference.dequantize(got[0].view(np.uint8), "float8_e4m3fn", got[1].reshape(m, -1), group)
        assert (np.abs(back - exact) <= 0.07 * np.abs(exact) + 2e-3 * np.abs(exact).max()).all()

    shape = (m, 1) if tuple(group) == (1, -1) else (m, -(-k // 128))
    outs = ((m, k), "float8_e4m3fn"), (shape, "float32")
    return Work(f"{'rms_norm' if norm else 'silu'} {m}x{k} {tuple(group)}", tuple(inputs), outs, call, check)


def product(m: int, n: int, k: int, mode: str, *, linear: bool = False) -> Work:
    """Return a product of scales per tensor, per row or by blocks, or the linear layer's function."""
    of_a, of_b = {"tensor": (PER_TENSOR, PER_TENSOR), "row": (PER_TOKEN, PER_CHANNEL), "block": (GROUP_128, BLOCK_128)}[
        mode
    ]
    inputs = []
    for i in range(VARIANTS):
        (x, a), (_, b) = _quantized(m, k, i, of_a), _quantized(n, k, i, of_b)
        operands = {"x": a.codes.view(NATIVE), "weight": b.codes.view(NATIVE), "scale_a": a.scale, "scale_b": b.scale}
        inputs.append(operands | {"codes": operands["x"]} | ({"x": x} if linear else {}))

    def call(o: Mapping[str, Any], outs: tuple[Any, ...] | None, **options: Any) -> tuple[Any, ...]:
        out = None if outs is None else outs[0]
        if linear:
            return (fp8core.linear(o["x"], o["weight"], o["scale_b"], group_shape=of_a, out=out, **options),)
        return (fp8core.scaled_mm_nt(o["x"], o["weight"], o["scale_a"], o["scale_b"], out=out, **options),)

    def check(o: Mapping[str, np.ndarray], got: list[np.ndarray]) -> None:
        codes = o["codes"].view(np.uint8)
        a = reference.dequantize(codes, "float8_e4m3fn", o["scale_a"], of_a).astype(np.float64)
        b = reference.dequantize(o["weight"].view(np.uint8), "float8_e4m3fn", o["scale_b"], of_b).astype(np.float64)
        bounded(got[0], a @ b.T, np.abs(a) @ np.abs(b).T, "bfloat16")

    name = f"{'linear' if linear else 'scaled_mm_nt'} {m}x{n}x{k} {mode}"
    return Work(name, tuple(inputs), (((m, n), "bfloat16"),), call, check)


def grouped(sizes: tuple[int, ...], n: int, k: int, mode: str) -> Work:
    """Return a product of groups of these sizes."""
    ends, inputs = ends_of(sizes), []
    for i in range(VARIANTS):
        a, weight, scale_a, scale_b = operands(len(sizes), sum(sizes), n, k, mode, low=0.001 * (i + 1))
        turned = np.roll(a, i, 0)  # each variant has other rows
        inputs.append({"x": turned, "weight": weight, "scale_a": scale_a, "scale_b": scale_b, "offs": ends})

    def call(o: Mapping[str, Any], outs: tuple[Any, ...] | None, **options: Any) -> tuple[Any, ...]:
        given = o["x"], o["weight"], o["scale_a"], o["scale_b"]
        out = None if outs is None else outs[0]
        return (fp8core.grouped_scaled_mm_nt(*given, offs=o["offs"], out=out, **options),)

    def check(o: Mapping[str, np.ndarray], got: list[np.ndarray]) -> None:
        of = Grouped(o["x"], o["weight"], o["scale_a"], o["scale_b"])
        bounded(got[0], exact(of, mode, ends), exact(of.absolute(), mode, ends), "bfloat16")

    name = f"grouped_scaled_mm_nt {sizes} {n}x{k} {mode}"
    return Work(name, tuple(inputs), (((sum(sizes), n), "bfloat16"),), call, check)


def mixture(tokens: int, each: int, experts: int, cols: int) -> Work:
    """Return the sum of the rows of each token after they were sorted by expert."""
    inputs = []
    for i in range(VARIANTS):
        ids = np.roll(choices(tokens, each, experts, outside=True), i, 1)  # each variant has other choices
        shares = _values((tokens, i), (tokens, each), "float32")
        inputs.append({"x": _values((cols, i), (tokens, cols)), "topk_ids": ids, "topk_weights": shares})

    def call(o: Mapping[str, Any], outs: tuple[Any, ...] | None, **options: Any) -> tuple[Any, ...]:
        rows, _, inverse = fp8core.moe_permute(o["x"], o["topk_ids"], experts, **options)
        out = None if outs is None else outs[0]
        return (fp8core.moe_unpermute(rows, inverse, o["topk_weights"], out=out, **options),)

    def check(o: Mapping[str, np.ndarray], got: list[np.ndarray]) -> None:
        _, inverse, of = placed(o["topk_ids"], experts)
        assert_same_bytes(got[0], summed(o["x"][of], inverse, o["topk_weights"], "bfloat16"))

    name = f"moe_permute and moe_unpermute {tokens}x{cols}, {each} of {experts}"
    return Work(name, tuple(inputs), (((tokens, cols), "bfloat16"),), call, check)


def works(*, large: bool) -> list[Work]:
    """Return the works: small ones for the host, those and larger ones for a GPU."""
    made = [
        *(
            quantization(m, k, g, "float8_e4m3fn", "bfloat16")
            for m, k in ((1, 64), (17, 256))
            for g in (PER_TENSOR, PER_TOKEN, GROUP_128)
        ),
        quantization(5, 100, (1, 32), "float8_e5m2", "float32"),
        quantization(130, 260, BLOCK_128, "float8_e4m3fnuz", "float16"),
        dequantization(17, 256, GROUP_128),
        dequantization(5, 96, PER_TOKEN),
        *(producer(9, 256, g, norm=norm) for g in (PER_TOKEN, GROUP_128) for norm in (True, False)),
        *(product(m, 48, 256, mode) for m in (1, 19) for mode in ("tensor", "row", "block")),
        *(product(7, 48, 256, mode, linear=True) for mode in ("tensor", "row", "block")),
        *(grouped((3, 0, 1, 9), 48, 256, mode) for mode in ("tensor-each", "row-row", "group-block")),
        *(mixture(*sizes) for sizes in ((1, 2, 4, 64), (19, 3, 40, 100))),
    ]
    if large:
        made += [
            *(
                quantization(m, 4096, g, "float8_e4m3fn", "bfloat16")
                for m, g in ((512, PER_TENSOR), (512, PER_TOKEN), (48, GROUP_128))
            ),
            *(product(m, 1024, 2048, mode) for m in (1, 64, 200) for mode in ("tensor", "row", "block")),
            *(grouped((0, 130, 7, 64), 1024, 2048, mode) for mode in ("tensor-each", "row-row", "group-block")),
            *(mixture(tokens, 8, 128, 2048) for tokens in (16, 700)),
            *(product(m, 1024, 2048, mode, linear=True) for m in (1, 64) for mode in ("tensor", "row", "block")),
        ]
    return made


class Bench:
    """A work on a machine: its operands there, and its answers, each made by a plain call and checked once."""

    def __init__(self, machine: Machine, work: Work) -> None:
        self.machine, self.work = machine, work
        self.operands = [{name: machine.upload(x) for name, x in given.items()} for given in work.inputs]
        self.checked: dict[int, list[np.ndarray]] = {}
        self.answers = {(i, p): self._answer(i, p) for i in range(len(work.inputs)) for p in PLACINGS}

    def placed(self, i: int, placing: Placing) -> dict[str, Any]:
        """Return the operands of a variant with x where the placing wants it."""
        x = self.operands[i]["x"]
        return self.operands[i] | {"x": self._at(self.work.inputs[i]["x"], x, placing.of_x) if placing.of_x else x}

    def _at(self, like: np.ndarray, x: Any, offset: int) -> Any:
        """Return a copy of ``x`` some elements off an aligned address."""
        raw = self.machine.memory(like.nbytes + GUARD)
        strides = tuple(like.itemsize * step for step in (like.shape[1], 1))
        there = self.machine.typed(raw, offset * like.itemsize, like.shape, like.dtype.name, strides)
        self.machine.copy(there, x)
        return there

    def room(self, placing: Placing) -> tuple[list[Any], tuple[Any, ...] | None, list[Place]]:
        """Return poisoned memory for all results with its guards, and the arrays in it with their places."""
        if placing.of_out is None:
            return [], None, []
        raws, arrays, places = [], [], []
        for shape, dtype in self.work.outs:
            size = numpy_dtype(dtype).itemsize
            gap = placing.gap if len(shape) > 1 else 0
            row = (shape[-1] + gap) * size
            raw = self.machine.memory(2 * GUARD + row * (shape[0] if len(shape) > 1 else 1) + placing.of_out * size)
            self.machine.poison(raw)
            strides = (row, size) if len(shape) > 1 else (size,)
            raws.append(raw)
            places.append(Place(GUARD + placing.of_out * size, dtype, shape, strides))
            arrays.append(self.machine.typed(raw, places[-1].first, shape, dtype, strides))
        return raws, tuple(arrays), places

    def run(self, i: int, placing: Placing, *, then: Callable[[], None] = tuple, **options: Any) -> list[Any]:
        """Call once, and ``then``, and return the bytes to compare: of results, or of all memory around them."""
        operands = self.placed(i, placing)
        raws, arrays, _ = self.room(placing)
        results = self.work.call(operands, arrays, **options)
        then()
        return raws or [self.machine.raw_of(x) for x in results]

    def _answer(self, i: int, placing: Placing) -> list[Any]:
        machine, work = self.machine, self.work
        operands = self.placed(i, placing)
        raws, arrays, places = self.room(placing)
        results = work.call(operands, arrays)
        machine.synchronize()
        made = [np.array(machine.engine.numpy(x), order="C") for x in results]
        if i not in self.checked:
            work.check(work.inputs[i], made)
            self.checked[i] = made
        for one, checked in zip(made, self.checked[i], strict=True):
            _check_alike(one, checked, work.name)
        if raws:
            self._check_guards(raws, places)
        return raws or [machine.raw_of(x) for x in results]

    def _check_guards(self, raws: list[Any], places: list[Place]) -> None:
        """Assert that an answer's memory holds poison wherever no result is."""
        for raw, place in zip(raws, places, strict=True):
            whole = np.array(self.machine.engine.numpy(raw))
            size = numpy_dtype(place.dtype).itemsize
            np.ndarray((*place.shape, size), np.uint8, whole, place.first, (*place.strides, 1))[...] = POISON
            assert (whole == POISON).all(), f"{self.work.name}: memory around a result was written"


def _check_alike(got: np.ndarray, checked: np.ndarray, name: str) -> None:
    """Assert that an answer is the one that was checked, or a product by another kernel: off by its last bits."""
    if got.dtype.itemsize != 2 or name.startswith("dequantize"):
        assert_same_bytes(got, checked)
        return
    one, other = got.astype(np.float64), checked.astype(np.float64)
    room = 2.0**-6 * np.abs(other) + 2e-3 * np.abs(other).max()
    assert (np.abs(one - other) <= room).all(), f"{name} differs from place to place"
