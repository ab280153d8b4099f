"""The scaled matrix product on the host: tiles are decoded to fp32 and multiplied by NumPy's BLAS."""

from typing import Final

import numpy as np

from fp8core.dtypes import FORMATS
from fp8core.host.activations import activated
from fp8core.host.codes import decode_table, encode, reciprocal, replace
from fp8core.host.memory import Array, Floats, Workspace, matrix, vector
from fp8core.host.tiles import tiles
from fp8core.problem import BLOCK, PER_TENSOR, ScaledMm
from fp8core.table import Launch

TILE: Final = 1024
"""The rows of a, and of the weight, that are multiplied at a time."""
DEPTH: Final = 512
"""The elements of k that are decoded at a time."""
SMALL: Final = 1 << 24
"""Products of at most this many multiplications, about a millisecond, stay on the calling thread."""
PART: Final = 1 << 18
"""OpenBLAS starts no threads for products of at most this many multiplications (SMP_THRESHOLD_MIN *
GEMM_MULTITHREAD_THRESHOLD)."""


class Buffers:
    """The memory of one launch: decoded tiles, their product, the sum of products, and a workspace for conversions."""

    def __init__(self, rows: int, cols: int, depth: int) -> None:
        self.left = np.empty(rows * depth, np.float32)
        self.right = np.empty(cols * depth, np.float32)
        self.part = np.empty(rows * cols, np.float32)
        self.total = np.empty(rows * cols, np.float32)
        self.work = Workspace.of(max(rows * cols, rows * depth, cols * depth))


def decode(codes: Array, dtype: str, buffer: Floats, work: Workspace) -> Floats:
    """Decode ``codes`` to fp32 in ``buffer``, and return them."""
    numbers = buffer[: codes.size].reshape(codes.shape)
    replace(codes, decode_table(dtype), numbers, work)
    return numbers


def multiply(left: Floats, right: Floats, out: Floats, one_by_one: bool) -> Floats:
    """Write ``left @ right.T`` to ``out``; ``one_by_one`` multiplies row by row.

    In one call of a BLAS the bits of a row depend on the number of rows.
    """
    for rows in (slice(row, row + 1) for row in range(len(left))) if one_by_one else (slice(None),):
        multiply_parts(left[rows], right, out[rows])
    return out


def multiply_parts(left: Floats, right: Floats, out: Floats) -> None:
    """Write ``left @ right.T`` to ``out``; a small product in parts for which the BLAS starts no threads.

    On few cores, threads of the BLAS wait for threads of torch or XLA, and a small product takes many times as long as
    on one thread.
    """
    (m, k), n = left.shape, len(right)
    if m * n * k > SMALL:
        np.matmul(left, right.T, out=out)
        return
    step = max(PART // max(min(m, n) * k, 1), 1)
    for start in range(0, max(m, n), step):
        part = slice(start, start + step)
        if m > n:
            np.matmul(left[part], right.T, out=out[part])
        else:
            np.matmul(left, right[part].T, out=out[:, part])


def scale_matrix(pointer: int, granularity: str, rows: int, k: int, strides: tuple[int, int]) -> Floats:
    """Return the scales of an operand as a matrix over its rows (row blocks for "block") and its blocks of k."""
    blocks = -(-k // BLOCK) if granularity in ("group", "block") else 1
    count = {"tensor": 1, "block": -(-rows // BLOCK)}.get(granularity, rows)
    return matrix(pointer, "float32", (count, blocks), strides)


def of_rows(scales: Floats, granularity: str, rows: slice) -> Floats:
    """Return the scales of some rows of an operand: ``[rows or 1, blocks of k or 1]``."""
    if granularity == "tensor":
        return scales
    return scales[np.arange(rows.start, rows.stop) // BLOCK] if granularity == "block" else scales[rows]


def product(a: Array, b: Array, scale_a: Floats, scale_b: Floats, problem: ScaledMm, buffers: Buffers) -> Floats:
    """Return the scaled product of some rows of a and of the stored b, accumulated in fp32 in ``buffers.total``."""
    grouped = problem.scale_a == "group" or problem.scale_b in ("group", "block")
    total, part = (memory[: len(a) * len(b)].reshape(len(a), -1) for memory in (buffers.total, buffers.part))
    total[...] = 0
    for start in range(0, problem.k, DEPTH):
        depth = slice(start, min(start + DEPTH, problem.k))
        left = decode(a[:, depth], problem.a, buffers.left, buffers.work)
        right = decode(b[:, depth], problem.b, buffers.right, buffers.work)
        if not grouped:
            total += multiply(left, right, part, problem.batch_invariant)
            continue
        for block in range(start // BLOCK, -(-depth.stop // BLOCK)):
            within = slice(block * BLOCK - start, min((block + 1) * BLOCK, depth.stop) - start)
            multiply(left[:, within], right[:, within], part, problem.batch_invariant)
            part *= column(scale_b, block).T
            part *= column(scale_a, block)
            total += part
    if not grouped and problem.k:
        total *= scale_b.T
        total *= scale_a
    return total


def column(scales: Floats, block: int) -> Floats:
    """Return the scales of one block of k as a column; scales without blocks of k are the same for all blocks."""
    return scales[:, block : block + 1] if scales.shape[1] > 1 else scales[:, :1]


def plan_scaled_mm(problem: ScaledMm) -> Launch:
    """Return the launch of ``out = round(activation(scale_a * (scale_b * (a @ b)) + bias + beta * out))``.

    It takes any shape, including k = 0. Sums are in fp32; with scales along k, each block of 128 elements of k is
    summed and scaled before it is added.
    """
    m, n, k = problem.m, problem.n, problem.k

    @np.errstate(all="ignore")
    def launch(
        _stream: int,
        a: int,
        b: int,
        scale_a: int,
        scale_b: int,
        bias: int,
        out: int,
        out_scale: int,
        amax: int,
        _scratch: int,
    ) -> None:
        """Multiply ``a [m, k]`` with the stored ``b [n, k]``."""
        left = matrix(a, problem.a, (m, k), (problem.lda, 1))
        right = matrix(b, problem.b, (n, k), (problem.ldb, 1))
        result = matrix(out, problem.out, (m, n), (problem.ldo, 1))
        scales_a = scale_matrix(scale_a, problem.scale_a, m, k, problem.scale_a_strides)
        scales_b = scale_matrix(scale_b, problem.scale_b, n, k, problem.scale_b_strides)
        added = vector(bias, problem.bias, n).astype(np.float32) if problem.bias else None
        factor = reciprocal(vector(out_scale, "float32", 1)) if problem.out_scale else None
        buffers, largest = Buffers(min(m, TILE), min(n, TILE), min(k, DEPTH)), np.float32(0)
        for first in range(0, n, TILE):
            cols = slice(first, min(first + TILE, n))
            of_b = of_rows(scales_b, problem.scale_b, cols)
            for start in range(0, m, TILE):
                rows = slice(start, min(start + TILE, m))
                of_a = of_rows(scales_a, problem.scale_a, rows)
                values = product(left[rows], right[cols], of_a, of_b, problem, buffers)
                if added is not None:
                    values += added[cols]
                if problem.beta:
                    values += np.float32(problem.beta) * result[rows, cols].astype(np.float32)
                values = activated(values, problem.activation)
                if problem.amax:
                    largest = np.fmax.reduce(np.abs(values), axis=None, initial=largest)
                if factor is not None:
                    values *= factor
                write(values, problem.out, result[rows, cols], buffers.work)
        if problem.amax:
            vector(amax, "float32", 1)[0] = largest

    return launch


def clear_amax(_stream: int, amax: int) -> None:
    """Write the amax of a product without rows or columns."""
    vector(amax, "float32", 1)[0] = 0.0


def write(values: Floats, dtype: str, out: Array, work: Workspace) -> None:
    """Write fp32 ``values`` to ``out``, rounded once."""
    if dtype not in FORMATS:
        out[...] = values
        return
    for tile in tiles(values.shape, PER_TENSOR):
        encode(np.ascontiguousarray(values[tile.rows, tile.cols]), dtype, out[tile.rows, tile.cols], work)
