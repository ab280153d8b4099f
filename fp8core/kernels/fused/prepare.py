"""The common parts of fused producers: the problems that they take, and the kernel for a number of rows.

These kernels compute values and quantize them in one launch: RMS norm (with or without a residual), SiLU times up. The
results are those of the unfused sequence in fp32. Two things are up to a kernel: the last bits of the mean of squares,
as its sum has any order, and those of ``exp``. So a value may differ from an oracle's by 6 ulp of fp32 (with
``round_intermediate``, if that crosses a tie, by one step of x's dtype), a scale by as much, and a code by one step.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Final, NamedTuple, TypeVar

from fp8core.kernels.encodings import FORMAT, SCALE_FORMAT, TYPE, mode_of
from fp8core.kernels.fused.configs import Problem, ProducerConfig, blocks_per_row, config_for, vector_of
from fp8core.runtime import jit, launches
from fp8core.runtime.plans import Plan, RmsNormNumbers, SiluNumbers, arguments, nothing
from fp8core.table import Launch, Requirement

UNALIGNED, VECTORS_AND_TAIL, WHOLE = range(3)
"""The alignment of rows, as in cuda_src/fused/scaled_codes.cuh."""


def constants_of(problem: Problem, config: ProducerConfig) -> dict[str, int]:
    """Return the constants of both sources."""
    spanned = config.threads * config.vectors * config.blocks * vector_of(problem)
    whole = config.vectors > 0 and problem.cols > 0 and problem.cols % spanned == 0
    return {
        "FP8_X": TYPE[problem.x],
        "FP8_FORMAT": FORMAT[problem.data],
        "FP8_ROUND": int(problem.round_intermediate),
        "FP8_MODE": mode_of(problem),
        "FP8_GROUP_ROWS": problem.group_shape.rows,
        "FP8_GROUP_COLS": problem.group_shape.cols,
        "FP8_SCALE_FORMAT": SCALE_FORMAT[problem.scale_format],
        "FP8_ALIGNED": UNALIGNED if problem.alignment < 16 else WHOLE if whole else VECTORS_AND_TAIL,
        "FP8_VECTORS": config.vectors,
        "FP8_THREADS": config.threads,
        "FP8_BLOCKS": config.blocks,
    }


class Source(NamedTuple):
    """A device source, its entry, and the declaration of its arguments."""

    name: str
    entry: str
    args: type[tuple[object, ...]]


Numbers = TypeVar("Numbers", RmsNormNumbers, SiluNumbers)


def plan_producer(
    problem: Problem,
    source: Source,
    kind: type[Numbers],
    grid: Callable[[int, int], launches.Dim3],
    constants: Callable[[ProducerConfig], Mapping[str, int]],
) -> Plan[Numbers]:
    """Return the plan of a producer.

    Args:
        problem: the problem.
        source: the kernel.
        kind: the numbers of its launches.
        grid: gives the grid for a number of rows, and of blocks per row.
        constants: gives further constants beside `constants_of`, in which kernels for few rows differ from those for
            many.
    """

    @cache
    def prepare(config: ProducerConfig) -> launches.Launcher:
        return jit.prepare(
            problem.target,
            source.name,
            source.entry,
            {**constants_of(problem, config), **constants(config)},
            source.args,
            block=config.threads,
            cluster=config.blocks,
            programmatic=True,
            # With few rows the kernel runs between products, which need all shared memory; with many it needs L1.
            all_shared=config.few,
        )

    def bind(numbers: Numbers) -> Launch:
        config = config_for(problem, numbers.rows)
        blocks = blocks_per_row(problem, config)
        if not numbers.rows or not blocks:
            return nothing
        given = arguments(source.args, numbers, cols=problem.cols, inverse_cols=1.0 / max(problem.cols, 1))
        return prepare(config).bind_args(grid(numbers.rows, blocks), given)

    return Plan(kind, bind)


GROUPS: Final = (8, 16, 32, 64, 128)
"""The columns of computed groups. Groups of these, and given groups of multiples of eight, are whole vectors of the
kernels, for any dtype of x."""


def _are_groups_of_vectors(problem: Problem) -> bool:
    rows, cols = problem.group_shape
    if problem.static:
        return cols < 0 or cols % GROUPS[0] == 0
    return rows == 1 and (cols < 0 or cols in GROUPS)


GROUPS_OF_VECTORS: Final = Requirement(
    _are_groups_of_vectors,
    "needs a scale per token or by groups of 1x8, 1x16, 1x32, 1x64 or 1x128, or given scales of groups with a multiple"
    " of 8 columns or with -1, got {p.group_shape}",
)
"""On the host, too, so that a call means the same on every device."""

MOST_COLUMNS: Final = (1 << 31) - (1 << 16)
"""The kernels count columns in 32 bits, past the end of a row by up to what a block takes at a time."""
COUNTABLE: Final = Requirement(
    lambda p: p.cols <= MOST_COLUMNS, f"needs at most {MOST_COLUMNS} columns, got {{p.cols}}"
)
