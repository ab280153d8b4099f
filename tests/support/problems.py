"""Problems that together require every kernel in every variant that it is compiled in, made without a device."""

from collections.abc import Iterator

from fp8core.dtypes import FORMATS, HIGH_PRECISION
from fp8core.problem import (
    BLOCK_128,
    GROUP_128,
    PER_TENSOR,
    PER_TOKEN,
    AllClose,
    Dequantize,
    Expand,
    GroupedMm,
    GroupShape,
    Linear,
    MoePermute,
    MoeUnpermute,
    Normalize,
    NormQuantize,
    Quantize,
    Requantize,
    ScaledMm,
    SiluQuantize,
)
from fp8core.target import Target

THOROUGH = (90, 0x942)
"""Architectures for which every variant is compiled; for others, each kernel is compiled in its main variants."""

PER_COLUMN = GroupShape(-1, 1)
MODES: tuple[tuple[GroupShape, bool, str, str], ...] = (
    (PER_TENSOR, False, "float32", "k"),
    (PER_TOKEN, False, "float32", "k"),
    (GROUP_128, False, "float32", "mn"),
    (PER_TENSOR, True, "float32", "k"),
    (BLOCK_128, False, "float32", "k"),
    (PER_COLUMN, False, "float32", "k"),
    (PER_TOKEN, True, "float32", "k"),
    (GROUP_128, False, "ue8m0", "k"),
    (GROUP_128, False, "ue8m0_bytes", "mn"),
    (GROUP_128, True, "float32", "k"),
    (GroupShape(3, 40), False, "float32", "k"),
    (PER_COLUMN, True, "float32", "k"),
)
"""Group shape, static, scale format, scale layout; the first `MAIN` are the main variants."""
MAIN = 4


def native(target: Target) -> str:
    """Return the E4M3 format that a target has instructions for, or the default one."""
    return "float8_e4m3fnuz" if target.arch == 0x942 else "float8_e4m3fn"


def modes(target: Target) -> tuple[tuple[GroupShape, bool, str, str], ...]:
    """Return the modes to try on a target."""
    return MODES if target.arch in THOROUGH else MODES[:MAIN]


def formats(target: Target) -> tuple[tuple[str, str, int, int], ...]:
    """Return the input dtypes, FP8 formats, columns and alignments to try, the main variant first."""
    main = (("bfloat16", native(target), 4096, 16),)
    if target.arch not in THOROUGH:
        return main
    others = tuple(("float16", name, 5120, 16) for name in FORMATS if name != native(target))
    return (
        *main,
        *others,
        ("float32", native(target), 4096, 16),
        ("bfloat16", native(target), 333, 1),
        ("float32", native(target), 7, 4),
    )


def quantize(target: Target) -> Iterator[Quantize]:
    for number, mode in enumerate(modes(target)):
        for form in formats(target) if number < 3 else formats(target)[:1]:
            yield Quantize(target, form[0], form[1], *mode, *form[2:])


def norm_quantize(target: Target) -> Iterator[NormQuantize]:
    for shape, static, *layout in modes(target):
        for form in formats(target)[:1]:
            for residual in (False, True):
                yield NormQuantize(
                    target, form[0], form[0], form[1], shape, static, *layout, residual, static, *form[2:]
                )
    for form in formats(target)[1:]:
        yield NormQuantize(target, form[0], form[0], form[1], PER_TOKEN, False, "float32", "k", False, False, *form[2:])


def silu_quantize(target: Target) -> Iterator[SiluQuantize]:
    for number, (shape, static, *layout) in enumerate(modes(target)):
        for form in formats(target) if number == 1 else formats(target)[:1]:
            yield SiluQuantize(target, form[0], form[1], shape, static, *layout, static, *form[2:])
    for static in (False, True):
        shape = PER_TENSOR if static else PER_TOKEN
        yield SiluQuantize(target, "float16", native(target), shape, static, "float32", "k", True, 4096, 16)


def dequantize(target: Target) -> Iterator[Dequantize]:
    for wide in HIGH_PRECISION:
        yield Dequantize(target, native(target), wide, PER_TOKEN, "float32", 4096, 16)
    for shape in (PER_TENSOR, GROUP_128, BLOCK_128, PER_COLUMN) if target.arch in THOROUGH else (BLOCK_128,):
        yield Dequantize(target, native(target), "bfloat16", shape, "float32", 4096, 16)
        yield Dequantize(target, "float8_e5m2", "float16", shape, "ue8m0_bytes", 333, 1)


def requantize(target: Target) -> Iterator[Requantize]:
    for shards, cols, alignment in ((3, 4096, 16), (64, 4096, 16), (500, 333, 1)):
        yield Requantize(target, native(target), shards, cols, alignment)


def normalize(target: Target) -> Iterator[Normalize]:
    for dtype in ("float8_e4m3fn", "float8_e4m3fnuz"):
        for alignment in (1, 16):
            yield Normalize(target, dtype, alignment)


def all_close(target: Target) -> Iterator[AllClose]:
    yield AllClose(target)


def expand(target: Target) -> Iterator[Expand]:
    yield Expand(target, 3)


SCALES: dict[tuple[str, str], tuple[tuple[int, int], tuple[int, int]]] = {
    ("tensor", "tensor"): ((0, 0), (0, 0)),
    ("row", "row"): ((1, 0), (1, 0)),
    ("tensor", "row"): ((0, 0), (1, 0)),
    ("group", "block"): ((1, 16), (1, 32)),
    ("group", "group"): ((1, 16), (32, 1)),
}
"""The strides of the scales of a product, by the granularities of both."""


def grouped_mm(target: Target) -> Iterator[GroupedMm]:
    """Yield grouped products: few and many rows of a group, every pair of scales, aligned and not."""
    e4m3 = native(target)
    for modes, strides in SCALES.items() if target.arch in THOROUGH else list(SCALES.items())[1:4:2]:
        for groups, m, k in ((8, 64, 4096), (256, 1024, 4096), (8, 8192, 8192)):
            for out, bias in (("bfloat16", ""), ("float32", "bfloat16")):
                one = ScaledMm(
                    *(target, m, 2048, k, e4m3, e4m3, out, *modes, *strides),
                    *(bias if out == "bfloat16" or not bias else "float32", False, False, True, False),
                    *(k, k, 2048, 16),
                )
                yield GroupedMm(groups, one, 2048 * k, 2048, 2048 if bias else 0)
        odd = ScaledMm(
            *(target, 300, 515, 333, e4m3, e4m3, "float16", *modes, *strides),
            *("float16", False, False, False, False, 333, 333, 515, 1),
        )
        yield GroupedMm(70, odd, 515 * 333, 515, 515)
        yield GroupedMm(
            3, odd._replace(k=336, lda=336, ldb=336, codes_alignment=16, out_alignment=2), 515 * 336, 515, 515
        )


def scaled_mm(target: Target) -> Iterator[ScaledMm]:
    e4m3 = native(target)
    e5m2 = "float8_e5m2fnuz" if e4m3.endswith("fnuz") else "float8_e5m2"
    for (scale_a, scale_b), strides in SCALES.items() if target.arch in THOROUGH else list(SCALES.items())[1:4:2]:
        for m in (1, 16, 64, 300):
            yield ScaledMm(
                *(target, m, 4096, 4096, e4m3, e4m3, "bfloat16", scale_a, scale_b, *strides),
                *("", False, False, True, False, 4096, 4096, 4096, 16),
            )
    if target.platform == "cuda" and (target.arch == 89 or target.arch >= 120):
        for (scale_a, scale_b), strides in SCALES.items():  # more channels: another config of the same kernel
            yield ScaledMm(
                *(target, 64, 28672, 4096, e4m3, e4m3, "bfloat16", scale_a, scale_b, *strides),
                *("", False, False, True, False, 4096, 4096, 28672, 16),
            )
    rows = ("row", "row", (1, 0), (1, 0))
    if target.arch == 90:  # configs with the rows of a on wgmma's M side
        block = ("group", "block", (1, 16), (1, 32))
        for n, k, a, b, out, bias, of in (
            (7168, 16384, e4m3, e4m3, "bfloat16", "", rows),
            (5376, 21504, e5m2, e4m3, "float32", "float16", rows),
            (57344, 8192, e4m3, e5m2, "float16", "", block),
            (10240, 5120, e4m3, e4m3, "bfloat16", "float32", block),
        ):
            yield ScaledMm(*(target, 48, n, k, a, b, out, *of), *(bias, False, False, True, False, k, k, n, 16))
    for a, b, bias in ((e4m3, e5m2, "float32"), (e5m2, e4m3, "float16")):
        yield ScaledMm(
            *(target, 8, 4096, 4096, a, b, "float16", *rows),
            *(bias, False, False, True, False, 4096, 4096, 4096, 16),
        )
    whole = ("tensor", "tensor", (0, 0), (0, 0))
    yield ScaledMm(
        target, 16, 100, 333, e4m3, e5m2, "float16", *rows, "float16", False, False, False, True, 333, 333, 100, 1
    )
    foreign = "float8_e4m3fn" if e4m3.endswith("fnuz") else "float8_e4m3fnuz"
    for m in (16, 300):  # in a format without FP8 instructions
        yield ScaledMm(
            *(target, m, 4096, 4096, foreign, e4m3, "bfloat16", *rows),
            *("", False, False, True, False, 4096, 4096, 4096, 16),
        )
    for m in (16, 64, 300):  # unaligned
        for scale_a, scale_b in (("row", "row"), ("group", "block"), ("group", "group"))[
            : 3 if target.arch == 90 else 2
        ]:
            yield ScaledMm(
                *(target, m, 4097, 4097, e4m3, e4m3, "bfloat16", scale_a, scale_b, *SCALES[scale_a, scale_b]),
                *("", False, False, m != 300, False, 4097, 4097, 4097, 1),
            )._replace(out_alignment=2)
    if target.arch == 90:  # results whose elements are stored one by one
        for modes, beta in ((("group", "group"), 0.0), (("row", "row"), 1.0)):
            yield ScaledMm(
                *(target, 300, 4097, 4096, e4m3, e4m3, "bfloat16", *modes, *SCALES[modes]),
                *("", False, False, True, False, 4096, 4096, 4097, 2),
            )._replace(codes_alignment=16, beta=beta)
        for m, n, k, modes, out in (  # unaligned, with an activation, in more configs of the fallbacks
            (64, 28672, 4097, ("row", "row"), "float32"),
            (128, 4975, 11869, ("group", "block"), "float32"),
            (30, 300, 515, ("group", "group"), "float32"),
            (5, 300, 100, ("row", "row"), "float32"),
            (7, 8221, 2049, ("row", "row"), e5m2),
        ):
            yield _unaligned(target, m, n, k, modes, out)
    if target.arch in THOROUGH:  # with an activation and beta
        for m in (16, 64, 300):
            yield ScaledMm(
                *(target, m, 7168, 16384, e4m3, e4m3, "bfloat16", *rows, "float32", False, False, True, False),
                *(16384, 16384, 7168, 16),
            )._replace(activation="gelu", beta=1.0)
    yield ScaledMm(
        target, 16, 4096, 4096, e4m3, e4m3, e4m3, *whole, "float32", True, True, True, False, 4096, 4096, 4096, 16
    )
    yield ScaledMm(
        target, 16, 4096, 4096, e5m2, e4m3, "float32", *rows, "bfloat16", False, True, True, False, 4096, 4096, 4096, 16
    )


def unaligned(target: Target) -> Iterator[ScaledMm]:
    """Yield unaligned products for the layouts of sm90_decode_unaligned. Other rows would only add kernels that differ
    little from those of `scaled_mm`, and take longer to compile than these."""
    if target.arch != 90:
        return
    row, block, group = ("row", "row"), ("group", "block"), ("group", "group")
    for m, n, k, modes, out in (
        (128, 4975, 11869, group, "float32"),
        (96, 4975, 2621, group, "float32"),
        (128, 4975, 11869, row, "float32"),
        (64, 448, 262, row, "float32"),
        (36, 793, 255, row, "float32"),
        (64, 5000, 515, block, "float32"),
        (30, 14622, 1345, row, "float32"),
        (12, 300, 1600, group, "float32"),
        (12, 5000, 8193, group, "float32"),
        (5, 5000, 8193, block, "float32"),
        (2, 11600, 81, block, "float32"),
        # With tiles of two residues where threads have the registers.
        (16, 12000, 513, row, "bfloat16"),
        (99, 1507, 6277, block, "float8_e5m2"),
        (99, 1507, 6277, group, "float8_e5m2"),
        (63, 5478, 199, row, "float8_e4m3fn"),  # aligned by two warpgroups that do not alternate
        (40, 793, 255, group, "bfloat16"),
        (64, 4500, 4101, block, "float8_e4m3fn"),
    ):
        yield _unaligned(target, m, n, k, modes, out)


def _unaligned(target: Target, m: int, n: int, k: int, modes: tuple[str, str], out: str) -> ScaledMm:
    """Return a product with a bias and an activation; one of float32 is added to what there is."""
    codes, adds, e4m3 = out in FORMATS, out == "float32", native(target)
    return ScaledMm(
        *(target, m, n, k, e4m3, e4m3, out, *modes, *SCALES[modes]),
        *("float32", codes, codes or adds, True, False, k, k, n, 1),
    )._replace(out_alignment=1 if codes else 4 if adds else 2, activation="gelu" if adds else "silu", beta=float(adds))


def linear(target: Target) -> Iterator[Linear]:
    """Yield layers for Hopper; on other architectures they only need the kernels of quantizations and products."""
    if target.arch != 90:
        return
    e4m3, row, tensor = native(target), ("row", "row", (1, 0), (1, 0)), ("tensor", "row", (0, 0), (1, 0))
    for m, n, k, x in (
        (1, 4096, 4096, "bfloat16"),
        (2, 6144, 4096, "float16"),
        (1, 7168, 16384, "bfloat16"),
        (8, 28672, 1024, "bfloat16"),
        (64, 4096, 128, "bfloat16"),
    ):
        for static, scales in ((False, row), (True, tensor)):
            product = ScaledMm(
                *(target, m, n, k, e4m3, e4m3, "bfloat16", *scales),
                *("", False, False, True, False, k, k, n, 16),
            )
            group = PER_TENSOR if static else PER_TOKEN
            yield Linear(Quantize(target, x, e4m3, group, static, "float32", "k", k, 16), product, k, float("inf"))


def moe_permute(target: Target) -> Iterator[MoePermute]:
    """Yield sorts of few and many experts, and rows of every alignment, with and without scales."""
    for ids, experts, each, row_bytes, scale_bytes, alignment in (
        ("int64", 128, 8, 2048, 4, 16),
        ("int32", 8, 2, 14336, 1, 16),
        ("int64", 1024, 4, 4096, 0, 16),
        ("int32", 300, 9, 333, 4, 1),
        ("int32", 512, 1, 40, 0, 8),
    ):
        yield MoePermute(target, ids, experts, each, row_bytes, scale_bytes, alignment)


def moe_unpermute(target: Target) -> Iterator[MoeUnpermute]:
    """Yield sums in every dtype, with and without weights, of aligned rows and of others."""
    for y, weights, out, each, cols, alignment in (
        ("bfloat16", "float32", "bfloat16", 8, 2048, 16),
        ("bfloat16", "bfloat16", "bfloat16", 2, 7168, 16),
        ("float32", "float16", "bfloat16", 10, 4096, 16),
        ("float16", "", "float32", 1, 333, 2),
        ("float32", "float32", "float32", 4, 7, 4),
    ):
        yield MoeUnpermute(target, y, weights, out, each, cols, alignment)
