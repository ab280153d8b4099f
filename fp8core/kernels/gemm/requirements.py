"""Requirements of rows of `scaled_mm`, each with its refusal.

By one of them a row states the granularities of scales that it takes, since it would misread others: `ROW_SCALES`,
`ROW_OR_BLOCK_SCALES`, `MIXED_SCALES`, or that of the libraries, `fp8core.kernels.gemm.blaslt.rows.KNOWN_SCALES`.
"""

from collections.abc import Callable
from typing import Any, Final

from fp8core.dtypes import HIGH_PRECISION, ITEMSIZE
from fp8core.features import features
from fp8core.kernels.encodings import ceil_div
from fp8core.problem import ScaledMm
from fp8core.runtime import limits
from fp8core.table import Refusal, Requirement
from fp8core.target import native_e4m3

OCP: Final = ("float8_e4m3fn", "float8_e5m2")
"""The formats of NVIDIA's tensor cores."""
TENSOR_CORES: Final = Requirement(
    lambda p: not features(p.target).isdisjoint(("fp8_mma", "wgmma", "tcgen05")),
    "needs FP8 matrix instructions (sm_89 and later; gfx942, gfx950, gfx1200, gfx1201), got {p.target}",
)
NOT_BOTH_E5M2: Final = Requirement(
    lambda p: not (p.a.startswith("float8_e5m2") and p.b.startswith("float8_e5m2")),
    "a and b are both e5m2, which no kernel here multiplies: one of them has to be e4m3",
)
OCP_FORMATS: Final = Requirement(
    lambda p: p.a in OCP and p.b in OCP and (p.a, p.b) != ("float8_e5m2", "float8_e5m2"),
    "needs e4m3fn or e5m2, but not e5m2 for both, got a {p.a} and b {p.b}",
)
AMD_FORMATS: Final = Requirement(
    lambda p: all(name.endswith("fnuz") == native_e4m3(p.target).endswith("fnuz") for name in (p.a, p.b)),
    "needs fnuz formats on gfx942 and OCP's on later GPUs, got a {p.a} and b {p.b} on {p.target}",
)
ROW_SCALES: Final = Requirement(
    lambda p: p.scale_a in ("tensor", "row") and p.scale_b in ("tensor", "row"),
    "takes scales per tensor or row in any mix, got scale_a per {p.scale_a} and scale_b per {p.scale_b}",
)
BLOCK_SCALES: Final = Requirement(
    lambda p: p.scale_a == "group" and p.scale_b in ("group", "block"),
    "takes 1x128 scales with 1x128 or 128x128, got scale_a per {p.scale_a} and scale_b per {p.scale_b}",
)
ROW_OR_BLOCK_SCALES: Final = Requirement(
    lambda p: ROW_SCALES.check(p) is None or BLOCK_SCALES.check(p) is None,
    "takes scales per tensor or row in any mix, or 1x128 with 1x128 or 128x128,"
    " got scale_a per {p.scale_a} and scale_b per {p.scale_b}",
)
MIXED_SCALES: Final = Requirement(
    lambda p: p.scale_a in ("tensor", "row", "group") and p.scale_b in ("tensor", "row", "group", "block"),
    "takes scales of a per tensor, row or 1x128 with scales of b per tensor, row, 1x128 or 128x128,"
    " got scale_a per {p.scale_a} and scale_b per {p.scale_b}",
)
FLOAT32_SCALES: Final = Requirement(
    lambda p: p.scale_dtype == "float32", "takes scales of float32, got {p.scale_dtype}"
)
ANY_OPERANDS: Final = (NOT_BOTH_E5M2, MIXED_SCALES, FLOAT32_SCALES)
"""What the fallbacks require of formats and scales, on GPUs and on the host."""
WIDE_RESULT: Final = Requirement(
    lambda p: p.out in HIGH_PRECISION and not p.amax,
    "gives float32, float16 or bfloat16 without out_scale and amax,"
    " got {p.out} with out_scale={p.out_scale} amax={p.amax}",
)
STRIDES_OF_16: Final = Requirement(
    lambda p: p.k > 0 and p.lda % 16 == 0 and p.ldb % 16 == 0,
    "needs k > 0 and lda and ldb that are multiples of 16, got k={p.k} lda={p.lda} ldb={p.ldb}",
)
CODES_AT_16: Final = Requirement(
    lambda p: max(p.alignment, p.codes_alignment) % 16 == 0,
    "needs a and b at addresses and in rows aligned to 16 bytes, got {p.codes_alignment}",
)
WHOLE_ELEMENTS: Final = Requirement(
    lambda p: max(p.alignment, p.out_alignment) % ITEMSIZE[p.out] == 0,
    "needs out at an address divisible by the size of its elements, got {p.out} aligned to {p.out_alignment}",
)
STEPS_OF_16: Final = Requirement(
    lambda p: p.k % 16 == 0 and STRIDES_OF_16.check(p) is None,
    "needs k (at least 16), lda and ldb that are multiples of 16, got k={p.k} lda={p.lda} ldb={p.ldb}",
)
SHORT_K: Final = Requirement(lambda p: p.k < 1 << 30, "needs k of less than 2**30, got k={p.k}")
WHOLE_WORDS: Final = Requirement(
    lambda p: p.vectors_alignment % 4 == 0,
    "needs scales and bias at addresses divisible by 4, got {p.vectors_alignment}",
)

MOST_COUNTED: Final = (1 << 31) - (1 << 16)
"""Kernels count rows, channels and k in 32 bits, past their ends by up to what all blocks take at a time."""
COUNTABLE: Final = Requirement(
    lambda p: max(p.m, p.n, p.k) <= MOST_COUNTED,
    f"needs m, n and k of at most {MOST_COUNTED}, got m={{p.m}} n={{p.n}} k={{p.k}}",
)


def of_product(requirement: Requirement) -> Requirement:
    """Require of the product of a group, or of a layer, what `requirement` requires of a product."""
    return Requirement.of(lambda p: requirement.check(p.product))


def few_rows(rows: int, known: str = "measured") -> Requirement:
    """Prefer up to ``rows`` rows, for which a kernel reads the weight once; ``known``: measured or estimated."""
    return Requirement(
        lambda p: p.m <= rows or p.batch_invariant,
        f"{known} slower for more rows, as it reads the weight once for every {rows}: preferred for m <= {rows}"
        " or batch_invariant; got m={p.m}",
    )


def block_count(rows: int, channels: int) -> Requirement:
    """Require a grid that a launch can have, with one block per ``rows`` x ``channels`` results."""

    def holds(p: ScaledMm) -> bool:
        return p.n < 1 << 30 and ceil_div(p.m, rows) * ceil_div(p.n, channels) < 1 << 31

    text = f"needs less than 2**31 blocks of {rows} x {channels} results"
    return Requirement(holds, text + ", got m={p.m} and n={p.n}")


def grid_fits(shape: Callable[[Any], tuple[int, int]]) -> Requirement:
    """Require a grid that a launch can have; ``shape`` gives its blocks along x and the threads of a block."""

    def check(p: Any) -> Refusal | None:
        blocks, threads = shape(p)
        most = limits.blocks_along_x(p.target, threads)
        text = f"needs at most {most} blocks of {threads} threads, got {blocks} for m={p.m} and n={p.n}"
        return None if blocks <= most else Refusal(text)

    return Requirement.of(check)
