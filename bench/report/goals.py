"""The performance goals as data, and the cases of results that meet them. Times are not rounded before comparison.

The goals were set in November 2026, before most kernels were written, from the baselines' times on an H200.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from bench.labels import LIBRARY, OPERATIONS
from bench.report import checks
from bench.report.checks import Check
from bench.results import Record, Results, large, neighbour_time, own_kernel, us

LATENCY: Final = 1.8
"""Microseconds that a maximum over the whole device takes in addition to a copy."""
PRODUCT_BOUNDS: Final = {"tensor": (1.7, 2.5), "row": (1.7, 2.5), "block": (2.0, 3.0)}
"""By mode of scales: the most microseconds above the floor for products of up to 16 and of up to 64 rows."""

ODD_PRODUCTS: Final = {True: 1.5, False: 2.5}
"""By whether an odd product has at most 64 rows: its longest time, as a multiple of the next aligned product's."""
SHARDS: Final = "Llama-70B/8"
"""The model whose decoder layer is so small that its bound is in microseconds: the gaps between launches dominate."""


class Goal(NamedTuple):
    """A goal: its subject, the bound as text and as a number, the source of the number, and the check."""

    what: str
    words: str
    threshold: float
    source: str
    checks: Callable[[Results, float], Iterable[Check]]

    @property
    def bound(self) -> str:
        """The bound with its number."""
        return self.words.format(self.threshold)


class Judged(NamedTuple):
    """A goal and the checks of the measured cases; empty if none was measured."""

    goal: Goal
    checks: Sequence[Check]


ROOFLINE: Final = "the floor; every baseline measured in November 2026 was further above it"
COPY: Final = "a copy of as many bytes in the same run"
SAME_RUN: Final = "timed in the same run"
PROJECT: Final = "set by the project"


def _deep_gemm(record: Record) -> float | None:
    return us(record, "deep_gemm")


def _products() -> Iterator[Goal]:
    for modes, said in ((("tensor", "row"), "per tensor and row"), (("block",), "1x128 x 128x128")):
        for (least, most), bound in zip(((1, 16), (17, 64)), PRODUCT_BOUNDS[modes[0]], strict=True):
            rows = f"m ≤ {most}" if least == 1 else f"m = {least} to {most}"
            records = partial(checks.few, modes=modes, least=least, most=most)
            yield Goal(
                f"product, {rows}, {said}",
                "≤ floor + {} us",
                bound,
                ROOFLINE,
                lambda found, most, records=records: checks.above(records(found), most),
            )


GOALS: Final = (
    *_products(),
    Goal(
        "product, m ≤ 64, fp8core kernel",
        "≤ {:g} x cuBLASLt",
        1.0,
        SAME_RUN,
        lambda found, most: checks.ratio(
            [r for r in checks.few(found, ("tensor", "row", "block"), 1, 64) if own_kernel(r)],
            lambda r: us(r, LIBRARY),
            most,
        ),
    ),
    Goal(
        "product, m > 64, per tensor and row",
        "≤ {} x the best of torch, vLLM, SGLang and cuBLASLt",
        1.02,
        SAME_RUN,
        lambda found, most: checks.ratio(checks.many(found, blocks=False), checks.others, most),
    ),
    Goal(
        "product, m > 64, 1x128 x 128x128",
        "≤ {:g} x DeepGEMM",
        1.0,
        SAME_RUN,
        lambda found, most: checks.ratio(checks.many(found, blocks=True), _deep_gemm, most),
    ),
    Goal(
        "product, m > 64, 1x128 x 128x128, at the median",
        "≤ {} x DeepGEMM",
        0.971,
        f"{SAME_RUN}: 1.03 x its speed",
        lambda found, most: checks.median_of(checks.ratio(checks.many(found, blocks=True), _deep_gemm, 1.0), most),
    ),
    Goal(
        "product, m > 64, 1x128 x 128x128, beside the library",
        "≤ {} x cuBLASLt's block modes",
        1.1,
        SAME_RUN,
        lambda found, most: checks.ratio(checks.many(found, blocks=True), lambda r: us(r, LIBRARY), most),
    ),
    *(
        Goal(
            f"product of odd n, odd k or odd addresses, m {'≤' if few else '>'} 64",
            "≤ {} x the next aligned product",
            bound,
            SAME_RUN,
            lambda found, most, few=few: checks.ratio(
                checks.odd_products(found, few=few), lambda r: us(r, "neighbour"), most
            ),
        )
        for few, bound in ODD_PRODUCTS.items()
    ),
    Goal(
        "grouped product, per token x per channel",
        "≤ {} x the best of torch and vLLM",
        1.02,
        SAME_RUN,
        partial(checks.grouped, mode="row"),
    ),
    Goal(
        "grouped product, 1x128 x 128x128",
        "≤ {:g} x the better of DeepGEMM's two kernels",
        1.0,
        SAME_RUN,
        partial(checks.grouped, mode="block"),
    ),
    *(
        Goal(
            f"routing of experts, {name}",
            "≤ {:g} x the better of SGLang and torch",
            1.0,
            SAME_RUN,
            partial(checks.moe, mode=mode),
        )
        for mode, name in OPERATIONS.items()
    ),
    Goal(
        "quantization moving ≥ 100 MB: static, per token, 1x128, both scale layouts",
        "≥ {} of the copy's speed",
        0.98,
        COPY,
        lambda found, least: checks.of_copy(
            [r for r in large(found.quantize) if r["mode"] in ("static", "token", "1x128", "1x128 mn")], least
        ),
    ),
    Goal(
        "dynamic per tensor, more than the chip holds",
        "≤ {} x the copy",
        1.55,
        f"{COPY}; x is read twice, and memory alone takes 1.56 x at 65536x8192",
        lambda found, most: checks.times_copy(checks.per_tensor(found, on_chip=False), lambda copy: most * copy),
    ),
    Goal(
        "dynamic per tensor, up to 32 MB",
        f"≤ {{}} x the copy, or copy + {LATENCY} us",
        1.25,
        f"{COPY}; the largest value has to be known before the first code is written",
        lambda found, most: checks.times_copy(
            checks.per_tensor(found, on_chip=True), lambda copy: max(most * copy, copy + LATENCY)
        ),
    ),
    Goal(
        "dynamic per tensor, one token",
        "≤ {} us",
        1.7,
        "the fastest kernel of a baseline for one token, November 2026",
        checks.one_token,
    ),
    Goal(
        "any quantization of one token",
        "≤ {} x the copy",
        1.2,
        COPY,
        lambda found, most: checks.times_copy([r for r in found.quantize if r["rows"] == 1], lambda copy: most * copy),
    ),
    Goal(
        "quantization of odd sizes (k = 5137, 1025, 576; m = 1, 3, 83, 4099)",
        "≤ {} x the aligned neighbour by bytes",
        1.3,
        SAME_RUN,
        lambda found, most: checks.ratio(found.odd, neighbour_time, most),
    ),
    Goal(
        "rms + quant, add + rms + quant, silu·mul + quant",
        "≥ {} of the copy's speed",
        0.94,
        COPY,
        lambda found, least: checks.of_copy(found.fused, least),
    ),
    Goal(
        "the same, moving ≥ 100 MB",
        "≥ {} of the copy's speed",
        0.94,
        COPY,
        lambda found, least: checks.of_copy(large(found.fused), least),
    ),
    Goal("linear in a graph, m ≤ 16", "≤ floor + {} us", 3.0, ROOFLINE, partial(checks.layers, least=1, most=16)),
    Goal("linear in a graph, m ≤ 64", "≤ floor + {} us", 3.5, ROOFLINE, partial(checks.layers, least=17, most=64)),
    Goal(
        "linear in a graph, m ≤ 16, beside its product",
        "≤ the product alone + {} us",
        1.5,
        SAME_RUN,
        partial(checks.beside_product, least=1, most=16),
    ),
    Goal(
        "the same, m = 17 to 64",
        "≤ the product alone + {:g} us",
        2.0,
        SAME_RUN,
        partial(checks.beside_product, least=17, most=64),
    ),
    Goal(
        "decoder layer in a graph, m ≤ 16, plain calls",
        "≤ {:.2f} x the sum of floors",
        1.1,
        ROOFLINE,
        lambda found, most: checks.decoder_layers(
            found, lambda r: most * r["floor_us"], 1, 16, lambda model: model != SHARDS
        ),
    ),
    Goal(
        f"the same, shards of {SHARDS}",
        "≤ the sum of floors + {:g} us",
        8.0,
        ROOFLINE,
        lambda found, most: checks.decoder_layers(
            found, lambda r: most + r["floor_us"], 1, 16, lambda model: model == SHARDS
        ),
    ),
    Goal(
        "decoder layer in a graph, m = 64, plain calls",
        "≤ {} x the sum of floors",
        1.25,
        ROOFLINE,
        lambda found, most: checks.decoder_layers(found, lambda r: most * r["floor_us"], 64, 64, lambda _: True),
    ),
    Goal(
        "decoder layer in a graph, results allocated by the library",
        "≤ {} x the layer with given memory",
        1.02,
        f"{SAME_RUN}; 2 % is noise",
        checks.plain_calls,
    ),
    Goal(
        "four layers of Qwen3-8B in transformers, compiled by compile_options in a graph, one token",
        "≤ {} x bfloat16's",
        0.53,
        SAME_RUN,
        partial(checks.hf_decoders, modes=("options",), tokens=1),
    ),
    Goal(
        "the same, 16 tokens",
        "≤ {} x bfloat16's",
        0.6,
        SAME_RUN,
        partial(checks.hf_decoders, modes=("options",), tokens=16),
    ),
    Goal(
        "the same layers, not compiled",
        "≤ {:g} x bfloat16's",
        1.0,
        f"{SAME_RUN}; both wait for the host",
        partial(checks.hf_decoders, modes=("eager",)),
    ),
    Goal("decoder layer under jax.jit", "≤ {} x bfloat16's", 0.7, SAME_RUN, checks.jax_layers),
    Goal(
        "a layer of one token in a program of JAX",
        "≤ {} us",
        6.0,
        PROJECT,
        lambda found, most: checks.in_programs(found, most, "fp8, one in a chain"),
    ),
    Goal(
        "an eager call on JAX arrays",
        "≤ {} us",
        60.0,
        PROJECT,
        lambda found, most: checks.in_programs(found, most, "quantize, eager", "linear, eager"),
    ),
    Goal(
        "host time, quantize with out",
        "≤ {:g} x vLLM's",
        1.0,
        SAME_RUN,
        partial(checks.host, step="quantize, out given", whose="vllm", theirs="quantize, out given"),
    ),
    Goal(
        "host time, scaled_mm, cuBLASLt",
        "≤ {:g} x torch._scaled_mm",
        1.0,
        SAME_RUN,
        partial(checks.host, step="scaled_mm m=80", whose="torch", theirs="_scaled_mm m=80"),
    ),
    Goal(
        "host time, scaled_mm, fp8core kernel",
        "≤ {:g} x torch._scaled_mm",
        0.75,
        SAME_RUN,
        partial(checks.host, step="scaled_mm m=16", whose="torch", theirs="_scaled_mm m=16"),
    ),
    Goal(
        "host time, Fp8Linear, cuBLASLt",
        "≤ {:g} x vLLM's two calls",
        0.8,
        SAME_RUN,
        partial(checks.host, step="Fp8Linear m=80", whose="vllm", theirs="quantize + scaled_mm m=80"),
    ),
    Goal(
        "host time, Fp8Linear, fp8core kernel",
        "≤ {:g} x vLLM's two calls",
        0.6,
        SAME_RUN,
        partial(checks.host, step="Fp8Linear m=16", whose="vllm", theirs="quantize + scaled_mm m=16"),
    ),
    Goal(
        "host engine, bfloat16 and float32",
        "≥ {:g} M elements/s on one core",
        300.0,
        f"{PROJECT}: eight billion weights in half a minute",
        checks.engine,
    ),
    Goal(
        "first call in a fresh process, kernels cached on disk",
        "≤ {} s beyond importing CuPy",
        0.5,
        f"{PROJECT}: hardly noticed at a terminal",
        checks.first_call,
    ),
)


def judge(found: Results) -> list[Judged]:
    """Return all goals with the checks of the results."""
    return [Judged(goal, list(goal.checks(found, goal.threshold))) for goal in GOALS]
