"""The rows of `scaled_mm` that multiply by a BLASLt library, alone or with launches of fp8core before and after it."""

from collections.abc import Callable
from typing import Final

from fp8core.dtypes import FORMATS, ITEMSIZE
from fp8core.kernels.gemm import fallback_cost
from fp8core.kernels.gemm.args import Matmul
from fp8core.kernels.gemm.blaslt import matmul, ordering, query
from fp8core.kernels.gemm.blaslt.descriptors import Product
from fp8core.kernels.gemm.blaslt.epilogue import plan_epilogue
from fp8core.kernels.gemm.blaslt.mapping import (
    FOUR,
    GELU,
    NATIVE_BIAS,
    SCALES,
    VECTOR_ALIGNMENT,
    accumulation,
    moved_bias,
    product,
    relayouts,
)
from fp8core.kernels.gemm.blaslt.pad_m import MOST_COPIED, MOST_PADDED, copied_halves, padded_product, plan_pad_m
from fp8core.kernels.gemm.blaslt.relayout import plan_relayout
from fp8core.kernels.gemm.blaslt.split_m import first_rows, last_rows, plan_split_m
from fp8core.kernels.gemm.fallback_cost import Estimate
from fp8core.kernels.gemm.requirements import (
    AMD_FORMATS,
    COUNTABLE,
    FLOAT32_SCALES,
    NOT_BOTH_E5M2,
    OCP,
    ROW_SCALES,
    STEPS_OF_16,
    TENSOR_CORES,
)
from fp8core.kernels.gemm.sm90.decode import SM90_DECODE
from fp8core.kernels.requirements import CUDA, HIP, aligned, supports
from fp8core.problem import ScaledMm
from fp8core.table import Kernel, Refusal, Requirement, Unknown


def offered(make: Callable[[ScaledMm], Product]) -> Requirement:
    """Require that the library offers an algorithm for ``make(problem)``."""

    def check(p: ScaledMm) -> Refusal | Unknown | None:
        return query.refusal(make(p))

    return Requirement.of(check)


def plan_direct(p: ScaledMm, number: int = 0) -> Matmul:
    """Return the library's product by its algorithm ``number``, with the operands as they are."""
    return matmul.plan(product(p), number)


def algorithms(p: ScaledMm) -> tuple[str, ...]:
    """Return the names of the algorithms that the library offers for the product itself."""
    return tuple(candidate.name for candidate in query.algorithms(product(p)))


def accumulations(p: ScaledMm) -> tuple[str, ...]:
    """Return the names of the algorithms that the library offers for the product without scales and bias."""
    return tuple(candidate.name for candidate in query.algorithms(accumulation(p)))


RELAYOUT_US: Final = 1.25
"""Time of an fp8core launch that copies little, before the library's."""


def with_library_us(us: Callable[[ScaledMm, float], float], make: Callable[[ScaledMm], Product]) -> Estimate:
    """Return an estimate, or None: ``us`` of a problem and of the time of the library's product ``make(problem)``."""

    def estimate(p: ScaledMm) -> float | None:
        found = query.algorithms(make(p))[0].us
        return None if found is None else us(p, found)

    return estimate


product_us: Final = with_library_us(lambda _, us: us, product)
relayout_us: Final = with_library_us(lambda _, us: us + RELAYOUT_US, product)


def between_sectors(p: ScaledMm) -> bool:
    """Return whether rows of codes begin within sectors of L2, where sm90_tiled loads slowest.

    Elsewhere none of 209 products was more than 6 % faster by cublaslt_pad_m, including its copies, so the library is
    not queried for every number of rows.
    """
    return p.k % ordering.SECTOR > 0


def padded_estimate(p: ScaledMm) -> float | None:
    """Return the estimated microseconds of cublaslt_pad_m if it is compared with other kernels, or None."""
    return with_library_us(fallback_cost.pad_m_us, padded_product)(p) if between_sectors(p) else None


OCP_NAMES: Final = Requirement(
    lambda p: p.a in OCP and p.b in OCP, f"needs {' or '.join(OCP)}, got a {{p.a}} and b {{p.b}}"
)
ANY_BATCH: Final = Requirement(
    lambda p: not p.batch_invariant,
    "the library chooses its algorithm by m, so the sums of a row would depend on the batch",
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
K_BLOCKS: Final = Requirement(lambda p: p.scale_a == "group", "needs 1x128 scales of a, got scale_a per {p.scale_a}")
ALIGNED_VECTORS: Final = Requirement(
    lambda p: p.vectors_alignment >= VECTOR_ALIGNMENT,
    f"needs scales and bias at addresses divisible by {VECTOR_ALIGNMENT}, got {{p.vectors_alignment}}",
)
ALIGNED_AMAX: Final = Requirement(
    lambda p: not p.amax or p.vectors_alignment >= VECTOR_ALIGNMENT,
    f"needs amax at an address divisible by {VECTOR_ALIGNMENT}, got {{p.vectors_alignment}}",
)
ALIGNED_BIAS: Final = Requirement(
    lambda p: not moved_bias(p),
    f"needs a bias at an address divisible by {VECTOR_ALIGNMENT}, got {{p.vectors_alignment}}",
)
SCALES_IN_PLACE: Final = Requirement(
    lambda p: all(not place.rows for place in relayouts(p)),
    "needs vectors without gaps, 1x128 scales stored [k/128][rows], 128x128 scales in rows of a multiple of 4,"
    " got strides {p.scale_a_strides} of scale_a and {p.scale_b_strides} of scale_b",
)
GIVES_CODES: Final = Requirement(
    lambda p: p.out not in FORMATS or (p.scale_a, p.scale_b) == ("tensor", "tensor"),
    "the library gives {p.out} with scales per tensor only, got scale_a per {p.scale_a} and scale_b per {p.scale_b}",
)
NO_OUT_SCALE: Final = Requirement(
    lambda p: not p.out_scale, "the library takes the inverse of out_scale, which has to be computed first"
)
GIVES_AMAX: Final = Requirement(
    lambda p: not p.amax or p.out in FORMATS, "the library gives amax with FP8 results only, got {p.out}"
)
ADDS_BIAS: Final = Requirement(
    lambda p: not p.bias or p.bias in NATIVE_BIAS[p.out], "the library does not add a {p.bias} bias to a {p.out} result"
)
HAS_ACTIVATION: Final = Requirement(
    lambda p: p.activation in ("", GELU), f"the library has no activation but {GELU}, got {{p.activation}}"
)
NO_ENDING: Final = (
    Requirement(
        lambda p: not p.activation, "takes no activation, as it copies or divides the result, got {p.activation}"
    ),
    Requirement(lambda p: p.beta == 0, "takes no beta, as it copies or divides the result, got {p.beta}"),
)
FOURS: Final = Requirement(
    lambda p: p.scale_a != "group" or p.m % FOUR == 0,
    f"needs m that is a multiple of {FOUR} with 1x128 scales of a, got m={{p.m}}",
)
RAGGED: Final = Requirement(
    lambda p: p.m > FOUR and p.m % FOUR != 0,
    f"needs m > {FOUR} that is not a multiple of {FOUR}, got m={{p.m}}",
)
FEW_TO_PAD: Final = Requirement(
    lambda p: p.m <= MOST_PADDED or between_sectors(p),
    f"measured slower than splitting m for more rows, as it copies a and out: preferred up to {MOST_PADDED} rows;"
    " got m={p.m}",
)
DENSE: Final = Requirement(
    lambda p: p.lda == p.k and p.ldo == p.n,
    "needs rows without gaps, got lda={p.lda} with k={p.k} and ldo={p.ldo} with n={p.n}",
)
COPIES_COUNT: Final = Requirement(
    lambda p: copied_halves(p) <= MOST_COPIED,
    f"needs a and out of at most {2 * MOST_COPIED} bytes, which it copies, got m={{p.m}} n={{p.n}} k={{p.k}}",
)
DECODES_LAST_ROWS: Final = Requirement.of(lambda p: SM90_DECODE.refusal(last_rows(p)))
VECTOR_SCALES_ON_SM90: Final = Requirement(
    lambda p: (p.scale_a, p.scale_b) == ("tensor", "tensor") or supports("wgmma").check(p) is None,
    "the library has scales per {p.scale_a} and {p.scale_b} on sm_90 only, got {p.target}",
)
AMD_SATURATION: Final = Requirement(
    lambda p: p.out != "float8_e4m3fnuz",
    "hipBLASLt saturates a {p.out} result at 240, and every kernel of this table at 224, the quantization maximum",
)
AMD_ROW_RESULT: Final = Requirement(
    lambda p: "row" not in (p.scale_a, p.scale_b) or p.out == "bfloat16",
    "hipBLASLt gives bfloat16 with scales per row, got {p.out}",
)

_ANY: Final = (NOT_BOTH_E5M2, FLOAT32_SCALES, COUNTABLE, ANY_BATCH, aligned(16), STEPS_OF_16)
_CUDA: Final = (CUDA, TENSOR_CORES, OCP_NAMES, *_ANY)
_HIP: Final = (HIP, TENSOR_CORES, AMD_FORMATS, *_ANY)
_LIBRARY: Final = (ALIGNED_ROWS, KNOWN_SCALES, GIVES_CODES, GIVES_AMAX, ADDS_BIAS, HAS_ACTIVATION)
_DIRECT: Final = (LIKE_SCALES, FOURS, NO_OUT_SCALE, ALIGNED_VECTORS, SCALES_IN_PLACE, offered(product))
_RELAYOUT: Final = (FOURS, ALIGNED_AMAX, offered(product))
_RAGGED: Final = (*_CUDA, supports("wgmma"), K_BLOCKS, *_LIBRARY, *NO_ENDING, RAGGED)
_EPILOGUE: Final = (ROW_SCALES, ALIGNED_ACCUMULATORS, offered(accumulation))


def _of_both(
    name: str, target: tuple[Requirement, ...], modes: tuple[Requirement, ...]
) -> tuple[Kernel, Kernel, Kernel]:
    """Return the rows that both libraries have."""
    own = (*target, *_LIBRARY, *modes)
    relayout, epilogue = f"{name}_relayout", f"{name}_epilogue"
    return (
        Kernel(name, (*own, *_DIRECT), plan_direct, algorithms=algorithms, us=product_us),
        Kernel(relayout, (*own, *_RELAYOUT), plan_relayout, algorithms=algorithms, us=relayout_us),
        Kernel(
            epilogue,
            (*target, *_EPILOGUE),
            plan_epilogue,
            algorithms=accumulations,
            rough=with_library_us(fallback_cost.epilogue_us, accumulation),
        ),
    )


CUBLASLT, CUBLASLT_RELAYOUT, CUBLASLT_EPILOGUE = _of_both("cublaslt", _CUDA, (VECTOR_SCALES_ON_SM90,))
CUBLASLT_PAD_M: Final = Kernel(
    "cublaslt_pad_m",
    (*_RAGGED, DENSE, COPIES_COUNT, ALIGNED_BIAS, offered(padded_product)),
    plan_pad_m,
    (FEW_TO_PAD,),
    us=padded_estimate,
    compared=between_sectors,
    rough=with_library_us(fallback_cost.pad_m_us, padded_product),
)
CUBLASLT_SPLIT_M: Final = Kernel(
    "cublaslt_split_m",
    (*_RAGGED, DECODES_LAST_ROWS, offered(first_rows)),
    plan_split_m,
    rough=with_library_us(fallback_cost.split_m_us, first_rows),
)
CUBLASLT_ROWS: Final = (CUBLASLT, CUBLASLT_RELAYOUT, CUBLASLT_PAD_M, CUBLASLT_SPLIT_M, CUBLASLT_EPILOGUE)
HIPBLASLT_ROWS: Final = _of_both("hipblaslt", _HIP, (AMD_ROW_RESULT, AMD_SATURATION))
