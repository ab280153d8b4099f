"""The goals, and which cases of a benchmark's results meet them. Nothing is rounded before it is compared."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from bench.results import DECODE, LIBRARY, Record, Results, best_peer, large, neighbour_time, own, shape, us, values

ON_CHIP: Final = 32 << 20
"""Bytes of input up to which a tensor is read from memory once even if its scale comes from all of it."""
HOST_RATE: Final = 300.0
"""Million elements a second."""


class Check(NamedTuple):
    """One case of a goal: its name, the part of the bound that it uses (up to 1 is met), and what was measured."""

    case: str
    used: float
    text: str

    @property
    def met(self) -> bool:
        """Whether it keeps the bound."""
        return self.used <= 1


class Goal(NamedTuple):
    """What is to be reached, and the cases that were measured."""

    what: str
    bound: str
    checks: Sequence[Check]


def _named(record: Record) -> str:
    words = [record[key] for key in ("kind", "mode") if key in record]
    return f"{', '.join(words)}, {shape(record)}"


def _above(records: Sequence[Record], bound: float) -> Iterator[Check]:
    """Check the time above the floor."""
    for r in records:
        mine = own(r)
        if mine is not None:
            more = mine - r["floor_us"]
            yield Check(_named(r), more / bound, f"{more:+.2f} us")


def _of_copy(records: Sequence[Record], bound: float) -> Iterator[Check]:
    """Check the share of the copy's speed."""
    for r in records:
        mine, copy = us(r, "fp8core"), us(r, "copy")
        if mine and copy:
            yield Check(_named(r), bound * mine / copy, f"{copy / mine:.3f}")


def _times_copy(records: Sequence[Record], bound: Callable[[float], float]) -> Iterator[Check]:
    """Check the time against a bound that depends on the copy's."""
    for r in records:
        mine, copy = us(r, "fp8core"), us(r, "copy")
        if mine and copy:
            yield Check(_named(r), mine / bound(copy), f"{mine / copy:.2f} x the copy, {mine - copy:+.2f} us")


def _ratio(records: Sequence[Record], other: Callable[[Record], float | None], bound: float) -> Iterator[Check]:
    """Check the time against another's."""
    for r in records:
        mine, theirs = own(r), other(r)
        if mine and theirs:
            yield Check(_named(r), mine / theirs / bound, f"{mine / theirs:.3f}")


def _others(record: Record) -> float | None:
    """Return the least time of the baselines and of cuBLASLt."""
    best = best_peer(record)
    return min(values(lambda r: us(r, LIBRARY), [record]) + ([best[0]] if best else []), default=None)


def _products(found: Results) -> Iterator[Goal]:
    few = [r for r in found.decode if r["m"] <= 64]
    for modes, said, bounds in (
        (("tensor", "row"), "per tensor and row", (1.7, 2.5)),
        (("block",), "1x128 x 128x128", (2.0, 3.0)),
    ):
        for low, high, bound in ((1, 16, bounds[0]), (17, 64, bounds[1])):
            cases = [r for r in few if r["mode"] in modes and low <= r["m"] <= high]
            rows = f"m ≤ {high}" if low == 1 else f"m = {low} to {high}"
            yield Goal(f"product, {rows}, {said}", f"≤ floor + {bound} us", list(_above(cases, bound)))
    library = _ratio([r for r in few if us(r, DECODE)], lambda r: us(r, LIBRARY), 1.0)
    yield Goal("product, m ≤ 64, fp8core kernel", "≤ cuBLASLt", list(library))
    many = [r for r in found.decode if r["m"] >= 512]
    plain, blocks = ([r for r in many if (r["mode"] == "block") is blocked] for blocked in (False, True))
    yield Goal("product, m ≥ 512, per tensor and row", "≤ 1.03 x the best of all", list(_ratio(plain, _others, 1.03)))
    deep_gemm = _ratio(blocks, lambda r: us(r, "deep_gemm"), 1.0)
    yield Goal("product, m ≥ 512, 1x128 x 128x128", "≤ DeepGEMM", list(deep_gemm))
    library = _ratio(blocks, lambda r: us(r, LIBRARY), 1.1)
    yield Goal("the same", "≤ 1.1 x cuBLASLt's block modes", list(library))


def _quantization(found: Results) -> Iterator[Goal]:
    plain = [r for r in large(found.quantize) if r["mode"] in ("static", "token", "1x128", "1x128 mn")]
    what = "quantization moving ≥ 100 MB: static, per token, 1x128, both scale layouts"
    yield Goal(what, "≥ 0.98 of the copy", list(_of_copy(plain, 0.98)))
    tensor = [r for r in found.quantize if r["mode"] == "tensor" and r["rows"] > 1]
    beyond = [r for r in tensor if 2 * r["rows"] * r["cols"] > ON_CHIP]
    within = [r for r in tensor if 2 * r["rows"] * r["cols"] <= ON_CHIP]
    yield Goal(
        "dynamic per tensor, more than the chip holds",
        "≤ 1.55 x the copy",
        list(_times_copy(beyond, lambda c: 1.55 * c)),
    )
    checks = _times_copy(within, lambda c: max(1.25 * c, c + 1.8))
    yield Goal("dynamic per tensor, up to 32 MB", "≤ 1.25 x the copy or copy + 1.8 us", list(checks))
    token = [r for r in found.quantize if r["rows"] == 1]
    one = [(r, t) for r in token if r["mode"] == "tensor" and (t := us(r, "fp8core"))]
    yield Goal("dynamic per tensor, one token", "≤ 1.7 us", [Check(_named(r), t / 1.7, f"{t:.2f} us") for r, t in one])
    checks = _times_copy(token, lambda c: 1.2 * c)
    yield Goal("any quantization of one token", "≤ 1.2 x the copy", list(checks))
    what = "quantization of odd sizes (k = 5137, 1025, 576; m = 1, 3, 83, 4099)"
    yield Goal(what, "≤ 1.3 x the aligned neighbour by bytes", list(_ratio(found.odd, neighbour_time, 1.3)))
    what = "rms + quant, add + rms + quant, silu·mul + quant"
    yield Goal(what, "≥ 0.94 of the copy", list(_of_copy(found.fused, 0.94)))
    yield Goal("the same, moving ≥ 100 MB", "≥ 0.94 of the copy", list(_of_copy(large(found.fused), 0.94)))


def _linear(found: Results) -> Iterator[Goal]:
    for least, most, bound in ((1, 16, 3.0), (17, 64, 3.5)):
        some = [(r, t) for r in found.linear if least <= r["m"] <= most and (t := us(r, "fp8core"))]
        checks = [Check(shape(r), (t - r["floor_us"]) / bound, f"{t - r['floor_us']:+.2f} us") for r, t in some]
        yield Goal(f"linear in a graph, m ≤ {most}", f"≤ floor + {bound} us", checks)


def _host(found: Results) -> Iterator[Goal]:
    spent = {(r["framework"], r["step"]): float(r["us"]) for r in found.calls}

    def against(step: str, whose: str, theirs: str, bound: float) -> list[Check]:
        mine, other = spent.get(("fp8core", step)), spent.get((whose, theirs))
        if mine is None or other is None:
            return []
        return [
            Check(
                f"{step}: {mine:.2f} us, {whose}'s {theirs}: {other:.2f} us",
                mine / other / bound,
                f"{mine / other:.2f} x",
            )
        ]

    given, both = "quantize, out given", "quantize + scaled_mm m=16"
    yield Goal("host time, quantize with out", "≤ vLLM's", against(given, "vllm", given, 1.0))
    for rows, bound in ((80, 1.0), (16, 0.75)):
        kernel = "fp8core kernel" if rows == 16 else "cuBLASLt"
        checks = against(f"scaled_mm m={rows}", "torch", f"_scaled_mm m={rows}", bound)
        yield Goal(f"host time, scaled_mm, {kernel}", f"≤ {bound:g} x torch._scaled_mm", checks)
    for rows, bound in ((80, 0.8), (16, 0.6)):
        kernel = "fp8core kernel" if rows == 16 else "cuBLASLt"
        checks = against(f"Fp8Linear m={rows}", "vllm", both, bound)
        yield Goal(f"host time, Fp8Linear, {kernel}", f"≤ {bound:g} x vLLM's two calls", checks)
    kinds = ("quantize bfloat16", "quantize float32", "dequantize to bfloat16", "dequantize to float32")
    rated = [r for r in found.host if r["mode"].split(",")[0] in kinds]
    checks = [Check(r["mode"], HOST_RATE / r["rate"], f"{r['rate']:.0f} M elements/s") for r in rated]
    yield Goal("host engine, bfloat16 and float32", f"≥ {HOST_RATE:.0f} M elements/s on one core", checks)


def goals(found: Results) -> list[Goal]:
    """Return the goals with what the results say of them; one without cases was not measured."""
    first = [Check("quantize and linear", r["s"] / 0.5, f"{r['s']:.2f} s") for r in found.first_call]
    return [
        *_products(found),
        *_quantization(found),
        *_linear(found),
        *_host(found),
        Goal("first call in a fresh process, kernels cached on disk", "≤ 0.5 s beyond importing CuPy", first),
    ]
