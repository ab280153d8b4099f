"""Checks results against goals: the cases of a goal, how much of its bound each uses, and the measurement."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Final, NamedTuple

from bench.labels import GROUPED, LIBRARY, MOE
from bench.odd_cases import FEW
from bench.results import Record, Results, best_baseline, own, shape, us, values

ON_CHIP: Final = 32 << 20
"""Up to this many bytes of input, quantization per tensor reads a tensor from memory once, although its scale needs
all of it."""


class Check(NamedTuple):
    """A case of a goal: its name, the fraction of the bound that it uses (met up to 1), and the measurement as text."""

    case: str
    used: float
    text: str

    @property
    def met(self) -> bool:
        """Whether the case meets the bound."""
        return self.used <= 1


def named(record: Record) -> str:
    """Return the name of a record as a case."""
    words = [record[key] for key in ("kind", "mode", "scales", "ending") if record.get(key)]
    return f"{', '.join(words)}, {shape(record)}"


def above(records: Sequence[Record], bound: float) -> Iterator[Check]:
    """Check the time above the floor."""
    for r in records:
        mine = own(r)
        if mine is not None:
            more = mine - r["floor_us"]
            yield Check(named(r), more / bound, f"{more:+.2f} us")


def of_copy(records: Sequence[Record], bound: float) -> Iterator[Check]:
    """Check the speed as a fraction of the copy's."""
    for r in records:
        mine, copy = us(r, "fp8core"), us(r, "copy")
        if mine and copy:
            yield Check(named(r), bound * mine / copy, f"{copy / mine:.3f}")


def times_copy(records: Sequence[Record], bound: Callable[[float], float]) -> Iterator[Check]:
    """Check the time against a bound that depends on the copy's time."""
    for r in records:
        mine, copy = us(r, "fp8core"), us(r, "copy")
        if mine and copy:
            yield Check(named(r), mine / bound(copy), f"{mine / copy:.2f} x the copy, {mine - copy:+.2f} us")


def ratio(records: Sequence[Record], other: Callable[[Record], float | None], bound: float) -> Iterator[Check]:
    """Check the time relative to another time of the same record."""
    for r in records:
        mine, theirs = own(r), other(r)
        if mine and theirs:
            yield Check(named(r), mine / theirs / bound, f"{mine / theirs:.3f}")


def median_of(checks: Iterable[Check], bound: float) -> Iterator[Check]:
    """Check the median of other checks, which were made with a bound of 1."""
    used = [check.used for check in checks]
    if used:
        middle = median(used)
        yield Check(f"median of {len(used)}", middle / bound, f"{middle:.3f}")


def others(record: Record) -> float | None:
    """Return the least time of the baselines and of cuBLASLt."""
    best = best_baseline(record)
    return min(values(lambda r: us(r, LIBRARY), [record]) + ([best[0]] if best else []), default=None)


# The records of a goal.


def few(found: Results, modes: Sequence[str], least: int, most: int) -> list[Record]:
    """Return the products with these modes of scales and with ``least`` to ``most`` rows."""
    return [r for r in found.decode if r["mode"] in modes and least <= r["m"] <= most]


def many(found: Results, *, blocks: bool) -> list[Record]:
    """Return the products with more than 64 rows, with or without blocked scales."""
    return [r for r in found.decode if r["m"] > 64 and (r["mode"] == "block") is blocks]


def odd_products(found: Results, *, few: bool) -> list[Record]:
    """Return the odd products with up to 64 rows, or those with more."""
    return [r for r in found.odd_products if (r["m"] <= FEW) is few]


def per_tensor(found: Results, *, on_chip: bool) -> list[Record]:
    """Return quantizations per tensor of more than one row, of tensors that fit on the chip or do not."""
    tensors = [r for r in found.quantize if r["mode"] == "tensor" and r["rows"] > 1]
    return [r for r in tensors if (2 * r["rows"] * r["cols"] <= ON_CHIP) is on_chip]


def one_token(found: Results, bound: float) -> Iterator[Check]:
    """Check the time of quantizing one token per tensor."""
    for r in found.quantize:
        time = us(r, "fp8core")
        if r["rows"] == 1 and r["mode"] == "tensor" and time:
            yield Check(named(r), time / bound, f"{time:.2f} us")


def layers(found: Results, bound: float, least: int, most: int) -> Iterator[Check]:
    """Check the time above the floor of linear layers with ``least`` to ``most`` rows."""
    for r in found.linear:
        time = us(r, "fp8core")
        if least <= r["m"] <= most and time:
            more = time - r["floor_us"]
            yield Check(shape(r), more / bound, f"{more:+.2f} us")


def jax_layers(found: Results, bound: float) -> Iterator[Check]:
    """Check the time of a decoder layer under jax.jit relative to bfloat16."""
    for r in found.jax_layer:
        fp8, bf16 = us(r, "fp8"), us(r, "bf16")
        if fp8 and bf16:
            yield Check(f"m={r['m']}", fp8 / bf16 / bound, f"{fp8 / bf16:.3f}")


def hf_decoders(found: Results, bound: float, modes: Sequence[str], tokens: int | None = None) -> Iterator[Check]:
    """Check the time of a transformers decoder, run in these modes, relative to bfloat16."""
    for r in found.hf_decoder:
        fp8, bf16 = us(r, "fp8core"), us(r, "bf16")
        if r["mode"] in modes and tokens in (None, r["m"]) and fp8 and bf16:
            yield Check(f"{r['mode']}, m={r['m']}", fp8 / bf16 / bound, f"{fp8 / bf16:.3f}")


def grouped(found: Results, bound: float, mode: str) -> Iterator[Check]:
    """Check the time of grouped products relative to the fastest baseline."""
    for r in found.grouped:
        mine, best = us(r, "fp8core"), fastest(r, GROUPED[1:])
        if r["mode"] == mode and mine and best:
            case = f"{r['model']}, {r['tokens']} tokens, {r['n']}x{r['k']}"
            yield Check(case, mine / best / bound, f"{mine / best:.3f}")


def moe(found: Results, bound: float, mode: str) -> Iterator[Check]:
    """Check the time of the routing of experts relative to the fastest baseline."""
    for r in found.moe:
        mine, best = us(r, "fp8core"), fastest(r, MOE[1:])
        if r["mode"] == mode and mine and best:
            yield Check(f"{r['model']}, {r['tokens']} tokens", mine / best / bound, f"{mine / best:.3f}")


def fastest(record: Record, names: Sequence[str]) -> float | None:
    """Return the least time of these variants; None if none was timed."""
    return min((time for name in names if (time := us(record, name))), default=None)


def in_programs(found: Results, bound: float, *names: str) -> Iterator[Check]:
    """Check the times of calls on JAX arrays."""
    for r in found.jax_layer:
        for name in names:
            time = us(r, name)
            if time:
                yield Check(name, time / bound, f"{time:.1f} us")


def beside_product(found: Results, bound: float, least: int, most: int) -> Iterator[Check]:
    """Check how much longer linear layers take than their product alone, within turns if the record has that."""
    for r in found.linear:
        time, product = us(r, "fp8core"), us(r, "product")
        if least <= r["m"] <= most and time and product:
            paired = r.get("more_us")
            more = paired["median"] if paired else time - product
            yield Check(shape(r), more / bound, f"{more:+.2f} us")


def decoder_layers(
    found: Results, bound: Callable[[Record], float], least: int, most: int, models: Callable[[str], bool]
) -> Iterator[Check]:
    """Check the plain calls of decoder layers with ``least`` to ``most`` rows against a bound from the record."""
    for r in found.layer:
        time, floor = us(r, "plain"), r["floor_us"]
        if least <= r["m"] <= most and models(r["model"]) and time:
            yield Check(layer_of(r), time / bound(r), f"{time / floor:.3f} x the floor, {time - floor:+.2f} us")


def layer_of(record: Record) -> str:
    """Return the name of a decoder layer as a case."""
    return f"{record['model']}, m={record['m']}"


def plain_calls(found: Results, bound: float) -> Iterator[Check]:
    """Check the time of a decoder layer without given results relative to the time with them."""
    for r in found.layer:
        plain, given = us(r, "plain"), us(r, "preallocated")
        if plain and given:
            yield Check(layer_of(r), plain / given / bound, f"{plain / given:.3f}")


def host(found: Results, bound: float, step: str, whose: str, theirs: str) -> Iterator[Check]:
    """Check the host time of a step relative to a step of a baseline."""
    spent = {(r["framework"], r["step"]): float(r["us"]) for r in found.calls}
    mine, other = spent.get(("fp8core", step)), spent.get((whose, theirs))
    if mine is not None and other is not None:
        case = f"{step}: {mine:.2f} us, {whose}'s {theirs}: {other:.2f} us"
        yield Check(case, mine / other / bound, f"{mine / other:.2f} x")


def engine(found: Results, bound: float) -> Iterator[Check]:
    """Check the rates of the host engine."""
    kinds = ("quantize bfloat16", "quantize float32", "dequantize to bfloat16", "dequantize to float32")
    for r in found.engine:
        if r["mode"].split(",")[0] in kinds:
            yield Check(r["mode"], bound / r["rate"], f"{r['rate']:.0f} M elements/s")


def first_call(found: Results, bound: float) -> Iterator[Check]:
    """Check the seconds of the first call."""
    for r in found.first_call:
        yield Check("quantize and linear", r["s"] / bound, f"{r['s']:.2f} s")
