"""Products of more than a few unaligned rows: copies in aligned rows, before and after a kernel that needs alignment.

If a kernel can store results at any address (sm90_tiled), only codes are copied.

A copy costs two passes over a and b, or over the result. With many products per weight that is less than a kernel that
loads rows at any address loses.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import ceil_div, round_up, scratch_part
from fp8core.kernels.gemm.args import Matmul, ready
from fp8core.kernels.gemm.generic import MOST_ROWS, plan_decode
from fp8core.kernels.gemm.requirements import COUNTABLE, MIXED_SCALES
from fp8core.kernels.gemm.sm90.tiled import SM90_TILED
from fp8core.problem import BLOCK, ScaledMm
from fp8core.runtime import jit
from fp8core.runtime.args import Int32, Int64, Pointer
from fp8core.table import Kernel, Launch, Refusal, Requirement, Table, Unknown
from fp8core.target import Target

ALIGNMENT: Final = 16
"""Alignment in bytes of the addresses and rows of copies."""
CHANNELS: Final = 8
"""The product of copies has a multiple of so many channels; generic_decode makes the others."""
THREADS: Final = 256
COLUMNS: Final = 4 * THREADS
"""Columns of a block of copy_rows."""
ROWS: Final = 4
"""Rows of a block of copy_rows at a time."""
BLOCKS_A_MULTIPROCESSOR: Final = 8
MOST_COPIED: Final = 1 << 30
"""Limit of the bytes of a and b that are copied: the memory that a call takes beside its result."""


class RealignArgs(NamedTuple):
    """The arguments of realign_codes."""

    a: Pointer
    lda: Int64
    out_a: Pointer
    m: Int32
    b: Pointer
    ldb: Int64
    out_b: Pointer
    n: Int32
    k: Int32
    ld: Int32
    cleared: Pointer


class CopyArgs(NamedTuple):
    """The arguments of copy_rows."""

    source: Pointer
    stride: Int64
    to: Pointer
    to_stride: Int64
    rows: Int32
    columns: Int32
    column_tiles: Int32


def copies_codes(p: ScaledMm) -> bool:
    """Return whether a and b are copied."""
    return bool(p.k % ALIGNMENT) or max(p.alignment, p.codes_alignment) < ALIGNMENT


def copies_out(p: ScaledMm) -> bool:
    """Return whether the result is copied: no kernel stores it at any address."""
    odd = bool(p.n % CHANNELS) or max(p.alignment, p.out_alignment) < ALIGNMENT
    return odd and SM90_TILED.refusal(in_place(p)) is not None


def in_place(p: ScaledMm) -> ScaledMm:
    """Return the problem of aligned copies of a and b that stores the result directly."""
    if copies_codes(p):
        k = round_up(p.k, ALIGNMENT)
        p = p._replace(k=k, lda=k, ldb=k)
    out_alignment = max(p.alignment, p.out_alignment)
    return p._replace(
        alignment=out_alignment, codes_alignment=ALIGNMENT, out_alignment=out_alignment, prefetch_weight=False
    )


def inner(p: ScaledMm) -> ScaledMm:
    """Return the problem of the aligned product, which has most channels of ``p``, or all."""
    most = in_place(p)
    if not copies_out(p):
        return most
    n = p.n // CHANNELS * CHANNELS
    return most._replace(n=n, ldo=round_up(n, ALIGNMENT), alignment=ALIGNMENT, out_alignment=ALIGNMENT)


def rest(p: ScaledMm) -> ScaledMm:
    """Return the problem of the last channels, after those of `inner`; its n may be 0."""
    most = inner(p)
    return p._replace(
        n=p.n - most.n, k=most.k, lda=most.lda, ldb=most.ldb, codes_alignment=ALIGNMENT, prefetch_weight=False
    )


def plan_realign(p: ScaledMm) -> Launch:
    """Return ``launch(stream, a, copy_of_a, b, copy_of_b, cleared)``: copies in rows of a multiple of 16 codes.

    Rows are padded with zeros. ``cleared`` is the address of an amax to set to 0, or 0.
    """
    ld = round_up(p.k, ALIGNMENT)
    blocks = ceil_div((p.m + p.n) * ld // ALIGNMENT, THREADS)
    most = p.target.multiprocessors * BLOCKS_A_MULTIPROCESSOR
    launcher = jit.prepare(
        p.target,
        "gemm/generic/realign",
        "realign_codes",
        {"FP8_BYTES": 1},
        RealignArgs,
        block=THREADS,
        programmatic=True,
    )
    args = RealignArgs(0, p.lda, 0, p.m, 0, p.ldb, 0, p.n, p.k, ld, 0)
    return launcher.bind_args((min(blocks, most), 1, 1), args)


def plan_copy(target: Target, rows: int, columns: int, itemsize: int, stride: int, to_stride: int) -> Launch:
    """Return ``launch(stream, source, to)``, which copies ``rows`` x ``columns`` elements; strides are in elements."""
    column_tiles = ceil_div(columns, COLUMNS)
    at_once = max(1, target.multiprocessors * BLOCKS_A_MULTIPROCESSOR // column_tiles)
    launcher = jit.prepare(
        target,
        "gemm/generic/realign",
        "copy_rows",
        {"FP8_BYTES": itemsize},
        CopyArgs,
        block=THREADS,
        programmatic=True,
    )
    args = CopyArgs(0, stride, 0, to_stride, rows, columns, column_tiles)
    return launcher.bind_args((column_tiles * min(ceil_div(rows, ROWS), at_once), 1, 1), args)


def plan_realigned(p: ScaledMm, plan: Callable[[ScaledMm], Matmul]) -> Matmul:
    """Return the product by ``plan``, with aligned copies of unaligned operands.

    `generic_decode` makes up to seven remaining channels, and stores them directly.
    """
    most, last = inner(p), rest(p)
    size = ITEMSIZE[p.out]
    multiply = plan(most)
    move = plan_realign(p) if copies_codes(p) else None
    copy = plan_copy(p.target, p.m, most.n, size, most.ldo, p.ldo) if copies_out(p) else None
    finish = plan_decode(last) if last.n else None
    at_a = scratch_part(multiply.scratch_bytes)
    at_b = at_a + (scratch_part(p.m * most.k) if move else 0)
    at_out = at_b + (scratch_part(p.n * most.k) if move else 0)
    skip_b, skip_out = most.n * most.ldb, most.n * size
    skip_scale = 4 * p.scale_b_strides[0] * (most.n // BLOCK if p.scale_b == "block" else most.n)
    skip_bias = most.n * ITEMSIZE[p.bias] if p.bias else 0

    def launch(stream: int, *addresses: int) -> None:
        a, b, scale_a, scale_b, bias, out, out_scale, amax, scratch = addresses
        if move is not None:
            move(stream, a, scratch + at_a, b, scratch + at_b, 0)
            a, b = scratch + at_a, scratch + at_b
        result = out if copy is None else scratch + at_out
        multiply(stream, a, b, scale_a, scale_b, bias, result, out_scale, amax, scratch)
        if finish is not None:
            finish(
                *(stream, a, b + skip_b, scale_a, scale_b + skip_scale, bias + skip_bias, out + skip_out),
                *(out_scale, amax, scratch),
            )
        if copy is not None:
            copy(stream, result, out)

    scratch_bytes = at_out + (scratch_part(p.m * most.ldo * size) if copy else 0)
    return ready(launch, scratch_bytes=scratch_bytes)


UNALIGNED: Final = Requirement(
    lambda p: copies_codes(p) or copies_out(p),
    "needs k, addresses or rows that are not multiples of 16 bytes, or n that is not a multiple of 8 if no kernel"
    " stores such rows, got k={p.k} n={p.n} with codes aligned to {p.codes_alignment} and out to {p.out_alignment}",
)
SOME_OF_ALL: Final = Requirement(
    lambda p: p.k > 0 and (p.n >= CHANNELS or not copies_out(p)), "needs k > 0 and n >= 8, got k={p.k} n={p.n}"
)
ONE_LAUNCH_AMAX: Final = Requirement(
    lambda p: not p.amax or not copies_out(p), "takes no amax where two launches share the result"
)
RESULT_IN_PLACE: Final = Requirement(
    lambda p: p.beta == 0 or not copies_out(p), "takes no beta where it copies the result, got {p.beta}"
)
ANY_ORDER: Final = Requirement(
    lambda p: not p.batch_invariant, "not batch-invariant: it is chosen by m, and so are the kernels between the copies"
)
FEW_COPIES: Final = Requirement(
    lambda p: not copies_codes(p) or (p.m + p.n) * round_up(p.k, ALIGNMENT) < MOST_COPIED,
    f"needs a and b of less than {MOST_COPIED} bytes, got m={{p.m}} n={{p.n}} k={{p.k}}",
)
FEW_ROWS: Final = 16
"""Up to so many rows, `generic_decode` was measured to be as fast as copies (experiments/2026-11-any-shape)."""
SMALL_WEIGHT: Final = 1 << 24
"""For weights of fewer codes it is as fast for all numbers of rows for which it reads the weight once."""


def realigned(kernels: tuple[Kernel, ...]) -> Kernel:
    """Return the row of `scaled_mm` that runs the first able one of ``kernels`` on copies."""
    table = Table("scaled_mm of aligned copies", ScaledMm, *kernels)

    def check(p: ScaledMm) -> Refusal | Unknown | None:
        if table.choice(inner(p)) is not None:
            return None
        reasons = (f"{kernel.name}: {kernel.refusal(inner(p))}" for kernel in kernels)
        return Refusal(f"no kernel runs the product of aligned copies: {'; '.join(reasons)}")

    def plan(p: ScaledMm) -> Matmul:
        most = inner(p)
        choice = table.choice(most)
        assert choice is not None
        made: Matmul = plan_realigned(p, lambda problem: table.planned(problem, choice))
        return made

    many = Requirement(
        lambda p: p.m > (MOST_ROWS if p.n * p.k < SMALL_WEIGHT else FEW_ROWS),
        f"slower for few rows, as it copies the weight or the result: preferred for m > {FEW_ROWS}, or with a weight of"
        f" less than {SMALL_WEIGHT} codes m > {MOST_ROWS}; got m={{p.m}} n={{p.n}} k={{p.k}}",
    )
    requires = (
        UNALIGNED,
        MIXED_SCALES,
        COUNTABLE,
        SOME_OF_ALL,
        ONE_LAUNCH_AMAX,
        RESULT_IN_PLACE,
        ANY_ORDER,
        FEW_COPIES,
        Requirement.of(check),
    )
    return Kernel("realigned", requires, plan, (many,))
