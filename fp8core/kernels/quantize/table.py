"""The kernels of quantization."""

from typing import Final

from fp8core import host
from fp8core.kernels.encodings import TENSOR, mode_of
from fp8core.kernels.quantize.configs import VEC8, fits, one_block_a_multiprocessor, unaligned
from fp8core.kernels.quantize.elementwise import plan_elementwise
from fp8core.kernels.quantize.rowwise import plan_rowwise
from fp8core.kernels.quantize.rowwise_unaligned import plan_rowwise_unaligned
from fp8core.kernels.quantize.tensorwise import plan_tensorwise
from fp8core.kernels.requirements import ON_A_GPU, ON_THE_HOST
from fp8core.problem import PER_TOKEN, Quantize
from fp8core.table import Kernel, Requirement, Table


def _whole_vectors(problem: Quantize) -> bool:
    return problem.group_shape.cols < 0 or problem.group_shape.cols % VEC8 == 0


def _has_tiles(problem: Quantize) -> bool:
    group = problem.group_shape
    return problem.static or group == PER_TOKEN or (group.rows > 0 and group.cols > 0)


TILES: Final = (
    Requirement(_has_tiles, "needs scales per token, group or block, or a given scale, got {p.group_shape}"),
    Requirement(_whole_vectors, "needs groups whose columns are a multiple of 8, got {p.group_shape}"),
    Requirement(fits, "needs a group that fits in registers, got {p.group_shape} of {p.cols} columns"),
    Requirement(lambda p: p.cols <= 1 << 28, "needs at most 2**28 columns, got {p.cols}"),
)

QUANTIZE: Final = Table(
    "quantize",
    Quantize,
    Kernel("host", (ON_THE_HOST,), host.plan_quantize),
    Kernel(
        "rowwise",
        (
            ON_A_GPU,
            Requirement(lambda p: not unaligned(p), "needs rows aligned to 8 bytes, got {p.alignment}"),
            *TILES,
        ),
        plan_rowwise,
    ),
    Kernel(
        "rowwise_unaligned",
        (
            ON_A_GPU,
            Requirement(unaligned, "needs rows aligned to less than 8 bytes, got {p.alignment}"),
            *TILES,
        ),
        plan_rowwise_unaligned,
    ),
    Kernel(
        "tensorwise",
        (
            ON_A_GPU,
            Requirement(
                lambda p: mode_of(p) == TENSOR,
                "needs one dynamic scale per tensor, got {p.group_shape} and static={p.static}",
            ),
            Requirement(
                one_block_a_multiprocessor,
                "needs a multiprocessor for each block, got {p.target} and x of {p.x}",
            ),
        ),
        plan_tensorwise,
        note="launches elementwise instead if not all blocks can run at once (green contexts, MPS; captures on ROCm)",
    ),
    Kernel("elementwise", (ON_A_GPU,), plan_elementwise),
)
"""In order of preference: kernels that read all elements once, one that may read a part twice, and the fallback."""
