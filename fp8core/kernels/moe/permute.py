"""Sorts choices of experts, and copies the rows of tokens to their places: in one launch, or two for many choices."""

from typing import Final, NamedTuple

from fp8core import host
from fp8core.kernels.encodings import ceil_div, column_tiling, power_of_two, round_up
from fp8core.kernels.requirements import ON_A_GPU, ON_THE_HOST
from fp8core.problem import MoePermute
from fp8core.runtime import jit
from fp8core.runtime.args import Int32, Int64, Pointer
from fp8core.runtime.plans import MoePermuteNumbers, Plan, arguments, nothing
from fp8core.table import Kernel, Launch, Requirement, Table

THREADS: Final = 256
PLACES: Final = 1024
"""The most choices of which a block copies rows."""
BLOCKS: Final = 8
"""Blocks for each multiprocessor: as many as run at a time."""
CHUNK: Final = 2048
"""The most choices that blocks count by themselves. More are divided into chunks, which a launch before counts."""
LEAST_CHOICES: Final = 32
"""Choices of a block where there are chunks: with fewer, the counts that it adds would take more time than its rows."""
MOST_CHUNKS: Final = 128
"""Chunks whose counts every block adds; with more choices, chunks are larger."""
LEAST_EXPERTS: Final = 64
"""Kernels have counters for a power of two of experts, at least for the lanes of a wave."""
MOST_EXPERTS: Final = 1024
ID: Final = {"int32": "unsigned", "int64": "word64"}
"""The type in device sources of a chosen expert: as an unsigned number, a negative one is too large."""
SCALE: Final = {0: "byte", 1: "byte", 4: "float"}
"""That of a scale, by its bytes."""


class CountArgs(NamedTuple):
    """The arguments of cuda_src/moe/count.cuh."""

    topk_ids: Pointer
    choices: Int32
    chunk: Int32
    experts: Int32
    counts: Pointer


class PermuteArgs(NamedTuple):
    """The arguments of cuda_src/moe/permute.cuh; strides are in elements, x_stride in bytes."""

    topk_ids: Pointer
    each: Int32
    experts: Int32
    counts: Pointer
    chunk_tokens: Int32
    x: Pointer
    x_stride: Int64
    scale: Pointer
    scale_row_stride: Int64
    scale_col_stride: Int64
    rows: Pointer
    row_scale: Pointer
    row_scale_row_stride: Int64
    row_scale_col_stride: Int64
    offs: Pointer
    inverse: Pointer
    tokens: Int32
    block_tokens: Int32
    row_bytes: Int32
    scale_cols: Int32
    column_tiles: Int32


class Division(NamedTuple):
    """How tokens are divided among blocks, and choices among chunks."""

    block_tokens: int
    chunk_tokens: int
    chunks: int

    @property
    def counted(self) -> bool:
        """Whether the choices of chunks are counted by a launch of their own."""
        return self.chunks > 1


def _tiling(p: MoePermute) -> tuple[int, int]:
    """Return the threads along a row, and the column tiles of a row."""
    return column_tiling(ceil_div(p.row_bytes, p.alignment), THREADS)


def division(p: MoePermute, tokens: int) -> Division:
    """Return the division of ``tokens`` tokens."""
    across, column_tiles = _tiling(p)
    each, blocks = max(1, p.each), max(1, BLOCKS * p.target.multiprocessors // column_tiles)
    counted = tokens * each > CHUNK
    least = max(ceil_div(tokens, blocks), ceil_div(LEAST_CHOICES, each) if counted else 1)
    block_tokens = min(round_up(least, THREADS // across), max(1, PLACES // each))
    if not counted:
        return Division(block_tokens, max(1, tokens), 1)
    chunk_tokens = round_up(max(ceil_div(CHUNK, each), ceil_div(tokens, MOST_CHUNKS)), block_tokens)
    return Division(block_tokens, chunk_tokens, ceil_div(tokens, chunk_tokens))


def most_counts_bytes(experts: int) -> int:
    """Return the bytes of the counts of the most chunks that there can be."""
    return 4 * MOST_CHUNKS * experts


def counts_bytes(p: MoePermute, tokens: int) -> int:
    """Return the bytes of the scratch of a launch: of the counts of all chunks, 0 if there is one."""
    found = division(p, tokens)
    return 4 * found.chunks * p.experts if found.counted and p.target.platform != "host" else 0


def plan_moe_permute(p: MoePermute) -> Plan[MoePermuteNumbers]:
    """Return the plan of `MOE_PERMUTE`."""
    experts = max(LEAST_EXPERTS, power_of_two(p.experts))
    across, column_tiles = _tiling(p)
    shared: dict[str, int | str] = {"FP8_EXPERTS": experts, "FP8_ID": ID[p.ids], "FP8_THREADS": THREADS}
    counting = jit.prepare(p.target, "moe/count", "count_experts", shared, CountArgs, block=THREADS, programmatic=True)
    permuting = jit.prepare(
        p.target,
        "moe/permute",
        "permute",
        {
            **shared,
            "FP8_VECTOR": p.alignment,
            "FP8_SCALE": SCALE[p.scale_bytes],
            "FP8_PLACES": PLACES,
            "FP8_ACROSS": across,
        },
        PermuteArgs,
        block=THREADS,
        programmatic=True,
    )

    def bind(n: MoePermuteNumbers) -> Launch:
        of = division(p, n.tokens)
        sizes = {"each": p.each, "experts": p.experts, "row_bytes": p.row_bytes, "column_tiles": column_tiles}
        numbers = arguments(PermuteArgs, n, **sizes, **of._asdict())
        blocks = column_tiles * max(1, ceil_div(n.tokens, of.block_tokens))
        permute = permuting.bind_args((blocks, 1, 1), numbers)
        chunk, choices = of.chunk_tokens * p.each, n.tokens * p.each
        count = nothing
        if of.counted:
            given = arguments(CountArgs, n, experts=p.experts, choices=choices, chunk=chunk)
            count = counting.bind_args((of.chunks, 1, 1), given)

        def launch(
            stream: int,
            x: int,
            scale: int,
            topk_ids: int,
            rows: int,
            row_scale: int,
            offs: int,
            inverse: int,
            counts: int,
            /,
        ) -> None:
            count(stream, topk_ids, counts)
            permute(stream, topk_ids, counts, x, scale, rows, row_scale, offs, inverse)

        return launch

    return Plan(MoePermuteNumbers, bind)


FEW_EXPERTS: Final = Requirement(
    lambda p: p.experts <= MOST_EXPERTS, f"needs at most {MOST_EXPERTS} experts, got {{p.experts}}"
)
FEW_CHOICES: Final = Requirement(
    lambda p: p.each <= PLACES, f"needs at most {PLACES} choices of a token, got {{p.each}}"
)
ROW_IN_32_BITS: Final = Requirement(
    lambda p: p.row_bytes < 1 << 31,
    "needs rows of less than 2**31 bytes, as it counts them in 32 bits, got {p.row_bytes}",
)
MOE_PERMUTE: Final = Table(
    "moe_permute",
    MoePermute,
    Kernel("moe_permute", (ON_A_GPU, FEW_EXPERTS, FEW_CHOICES, ROW_IN_32_BITS), plan_moe_permute),
    Kernel("host", (ON_THE_HOST,), host.plan_moe_permute),
)
"""A stable sort of the choices of experts, and the row of its token for each.

``inverse`` is the place of each choice, or -1 if there is no such expert; rows after the last end are not written. The
launch takes a scratch of `counts_bytes`.
"""
