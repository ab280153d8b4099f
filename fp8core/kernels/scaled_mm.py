"""The kernels of the scaled product, most preferred first."""

from collections.abc import Callable
from typing import Final

from fp8core import blaslt, host
from fp8core.blaslt.product import Product
from fp8core.kernels.generic_mm import plan_generic
from fp8core.kernels.hopper import HOPPER_ROWS
from fp8core.kernels.hopper_block import BLOCK_ROWS
from fp8core.kernels.library_mm import (
    FOUR,
    NATIVE_BIAS,
    SCALES,
    VECTOR_ALIGNMENT,
    accumulation,
    arrangements,
    moved_bias,
    plan_arranged,
    plan_direct,
    plan_rescaled,
    product,
)
from fp8core.kernels.mma_decode import MMA_ROWS
from fp8core.kernels.ragged_mm import (
    MOST_PADDED,
    first_rows,
    last_rows,
    padded_product,
    plan_finished,
    plan_padded,
)
from fp8core.kernels.requirements import (
    AMD_FORMATS,
    AMD_TENSOR_CORES,
    NOT_BOTH_E5M2,
    aligned,
    arch,
    arch_at_least,
    platform,
)
from fp8core.kernels.skinny import SKINNY_ROWS
from fp8core.problem import FORMATS, ITEMSIZE, ScaledMm
from fp8core.table import Kernel, Refusal, Requirement, Table, Unknown


def offered(*products: Callable[[ScaledMm], Product]) -> Requirement:
    """Require that the library offers an algorithm for each of the products that ``products`` make of a problem."""

    def check(p: ScaledMm) -> Refusal | Unknown | None:
        return next((reason for make in products if (reason := blaslt.answer(make(p))) is not None), None)

    return Requirement.of(check)


def algorithms(p: ScaledMm) -> int:
    """Return how many algorithms the library offers for the product itself."""
    return len(blaslt.offers(product(p)))


def accumulations(p: ScaledMm) -> int:
    """Return how many algorithms the library offers for the product without scales and bias."""
    return len(blaslt.offers(accumulation(p)))


def formats(*names: str) -> Requirement:
    """Require that a and b have one of the formats that the tensor cores at hand know."""
    return Requirement(
        lambda p: p.a in names and p.b in names, f"needs {' or '.join(names)}, got a {{p.a}} and b {{p.b}}"
    )


ANY_BATCH: Final = Requirement(
    lambda p: not p.batch_invariant,
    "the library chooses its algorithm by m, so the sums of a row would depend on the batch",
)
DIVISIBLE: Final = Requirement(
    lambda p: p.k > 0 and p.k % 16 == 0 and p.lda % 16 == 0 and p.ldb % 16 == 0,
    "needs k, lda and ldb that are multiples of 16, got k={p.k} lda={p.lda} ldb={p.ldb}",
)
ALIGNED_ROWS: Final = Requirement(
    lambda p: p.n % 8 == 0 and p.ldo * ITEMSIZE[p.out] % 16 == 0,
    "needs n that is a multiple of 8 and rows of out of a multiple of 16 bytes, got n={p.n} and ldo={p.ldo} of {p.out}",
)
ALIGNED_ACCUMULATORS: Final = Requirement(lambda p: p.n % 8 == 0, "needs n that is a multiple of 8, got n={p.n}")
KNOWN_SCALES: Final = Requirement(
    lambda p: (p.scale_a, p.scale_b) in SCALES,
    "the library has no mode for scale_a per {p.scale_a} with scale_b per {p.scale_b}",
)
LIKE_SCALES: Final = Requirement(
    lambda p: {p.scale_a, p.scale_b} != {"tensor", "row"},
    "the library takes no mix of modes, got scale_a per {p.scale_a} and scale_b per {p.scale_b}",
)
NO_K_BLOCKS: Final = Requirement(
    lambda p: p.scale_a in ("tensor", "row") and p.scale_b in ("tensor", "row"),
    "applies scales after the sum over k, got scale_a per {p.scale_a} and scale_b per {p.scale_b}",
)
K_BLOCKS: Final = Requirement(
    lambda p: p.scale_a == "group", "is for scales that change along k, got scale_a per {p.scale_a}"
)
NEAR: Final = Requirement(
    lambda p: p.vectors_alignment >= VECTOR_ALIGNMENT,
    f"needs scales and bias at addresses divisible by {VECTOR_ALIGNMENT}, got {{p.vectors_alignment}}",
)
NEAR_AMAX: Final = Requirement(
    lambda p: not p.amax or p.vectors_alignment >= VECTOR_ALIGNMENT,
    f"needs amax at an address divisible by {VECTOR_ALIGNMENT}, got {{p.vectors_alignment}}",
)
SCALES_LIE: Final = Requirement(
    lambda p: all(not place.rows for place in arrangements(p)),
    "needs vectors without gaps, 1x128 scales stored [k/128][rows], 128x128 scales in rows of a multiple of 4,"
    " got strides {p.scale_a_strides} of scale_a and {p.scale_b_strides} of scale_b",
)
GIVES_CODES: Final = Requirement(
    lambda p: p.out not in FORMATS or (p.scale_a, p.scale_b) == ("tensor", "tensor"),
    "the library gives {p.out} with scales per tensor only, got scale_a per {p.scale_a} and scale_b per {p.scale_b}",
)
NO_OUT_SCALE: Final = Requirement(
    lambda p: not p.out_scale, "the library multiplies by an inverse scale of the result, which has to be made first"
)
GIVES_AMAX: Final = Requirement(
    lambda p: not p.amax or p.out in FORMATS, "the library gives amax with FP8 results only, got {p.out}"
)
ADDS_BIAS: Final = Requirement(
    lambda p: not p.bias or p.bias in NATIVE_BIAS[p.out], "the library does not add a {p.bias} bias to a {p.out} result"
)
FOURS: Final = Requirement(
    lambda p: p.scale_a != "group" or p.m % FOUR == 0,
    f"the library takes 1x128 scales of rows that are a multiple of {FOUR}, got m={{p.m}}",
)
RAGGED: Final = Requirement(
    lambda p: p.m > FOUR and p.m % FOUR != 0,
    f"is for more rows than {FOUR} and no multiple of it, got m={{p.m}}",
)
FEW_TO_PAD: Final = Requirement(
    lambda p: p.m <= MOST_PADDED,
    f"measured slower than splitting m: preferred up to {MOST_PADDED} rows, as it copies a and the result;"
    " got m={p.m}",
)
BIAS_LIES: Final = Requirement(
    lambda p: not moved_bias(p),
    f"needs a bias at an address divisible by {VECTOR_ALIGNMENT}, got {{p.vectors_alignment}}",
)
DENSE: Final = Requirement(
    lambda p: p.lda == p.k and p.ldo == p.n,
    "copies rows without gaps, got lda={p.lda} with k={p.k} and ldo={p.ldo} with n={p.n}",
)


FINISHED_BY_DECODE: Final = Requirement.of(lambda p: HOPPER_ROWS[0].refusal(last_rows(p)))
FOURS_OF_CHANNELS: Final = Requirement(
    lambda p: p.scale_b != "group" or p.n % FOUR == 0,
    f"the library takes 1x128 scales of channels that are a multiple of {FOUR}, got n={{p.n}}",
)
HOPPER_MODES: Final = Requirement(
    lambda p: (p.scale_a, p.scale_b) == ("tensor", "tensor") or p.target.arch == 90,
    "the library has scales per {p.scale_a} and {p.scale_b} on sm_90 only, got {p.target}",
)
AMD_ROW_RESULT: Final = Requirement(
    lambda p: p.scale_a != "row" or p.out == "bfloat16", "hipBLASLt gives bfloat16 with scales per row, got {p.out}"
)

_ANY: Final = (NOT_BOTH_E5M2, ANY_BATCH, aligned(16), DIVISIBLE)
_CUDA: Final = (platform("cuda"), arch_at_least(89), formats("float8_e4m3fn", "float8_e5m2"), *_ANY)
_HIP: Final = (platform("hip"), AMD_TENSOR_CORES, AMD_FORMATS, *_ANY)
_LIBRARY: Final = (ALIGNED_ROWS, KNOWN_SCALES, GIVES_CODES, GIVES_AMAX, ADDS_BIAS)
_DIRECT: Final = (LIKE_SCALES, FOURS, FOURS_OF_CHANNELS, NO_OUT_SCALE, NEAR, SCALES_LIE, offered(product))
_ARRANGED: Final = (FOURS, FOURS_OF_CHANNELS, NEAR_AMAX, offered(product))
_RAGGED: Final = (*_CUDA, arch(90), K_BLOCKS, *_LIBRARY, FOURS_OF_CHANNELS, RAGGED)
_RESCALED: Final = (NO_K_BLOCKS, ALIGNED_ACCUMULATORS, offered(accumulation))


SCALED_MM: Final = Table(
    "scaled_mm",
    ScaledMm,
    *HOPPER_ROWS,
    *BLOCK_ROWS,
    *MMA_ROWS,
    Kernel("cublaslt", (*_CUDA, *_LIBRARY, HOPPER_MODES, *_DIRECT), plan_direct, algorithms=algorithms),
    Kernel("cublaslt_arranged", (*_CUDA, *_LIBRARY, HOPPER_MODES, *_ARRANGED), plan_arranged, algorithms=algorithms),
    Kernel("cublaslt_padded", (*_RAGGED, DENSE, BIAS_LIES, offered(padded_product)), plan_padded, (FEW_TO_PAD,)),
    Kernel("cublaslt_finished", (*_RAGGED, FINISHED_BY_DECODE, offered(first_rows)), plan_finished),
    Kernel("cublaslt_rescale", (*_CUDA, *_RESCALED), plan_rescaled, algorithms=accumulations),
    *SKINNY_ROWS,
    Kernel("hipblaslt", (*_HIP, *_LIBRARY, AMD_ROW_RESULT, *_DIRECT), plan_direct, algorithms=algorithms),
    Kernel("hipblaslt_arranged", (*_HIP, *_LIBRARY, AMD_ROW_RESULT, *_ARRANGED), plan_arranged, algorithms=algorithms),
    Kernel("hipblaslt_rescale", (*_HIP, *_RESCALED), plan_rescaled, algorithms=accumulations),
    Kernel("dequantize", (platform("cuda", "hip"), NOT_BOTH_E5M2), plan_generic),
    Kernel("host", (platform("host"), NOT_BOTH_E5M2), host.plan_scaled_mm),
)
"""The rows of `scaled_mm`."""


def plan_clear_amax(target):
    if target.platform == "host":
        import ctypes

        def clear(_stream, amax):
            ctypes.c_float.from_address(amax).value = 0.0

        return clear
    raise NotImplementedError
