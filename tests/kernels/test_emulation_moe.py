"""The text of the kernels that sort and sum the rows of experts on the CPU, bit for bit, in guarded memory."""

import numpy as np
import pytest

from fp8core.kernels.moe import MOE_PERMUTE, MOE_UNPERMUTE, counts_bytes, unpermute
from fp8core.problem import MoePermute, MoeUnpermute
from support.emulation import CUDA, HIP_32, HIP_64
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.running import FLOATS, alignment, empty, matrix, plans, same_bytes
from support.engines import fresh
from support.moe import choices, placed, summed


@pytest.mark.parametrize(
    ("target", "tokens", "each", "experts", "row_bytes", "gap", "scale_cols", "dtype"),
    [
        (CUDA, 16, 8, 128, 2048, 0, 16, np.int64),
        (CUDA, 300, 3, 40, 48, 16, 1, np.int32),
        (CUDA, 70, 9, 1024, 33, 0, 0, np.int64),
        (CUDA, 900, 8, 96, 16, 0, 2, np.int64),  # counted by a launch of its own
        (HIP_64, 150, 4, 256, 96, 0, 300, np.int32),
        (HIP_64, 700, 5, 1024, 24, 0, 1, np.int32),
        (HIP_64, 33, 2, 1000, 20, 4, 1, np.int64),
        (HIP_32, 90, 5, 64, 40, 0, 3, np.int32),
        (CUDA, 0, 2, 8, 32, 0, 1, np.int32),
        (CUDA, 5, 0, 8, 32, 0, 1, np.int32),
        (CUDA, 5, 2, 8, 0, 0, 1, np.int32),
    ],
    ids=str,
)
def test_permute_sorts_the_rows_by_expert(emulator, target, tokens, each, experts, row_bytes, gap, scale_cols, dtype):
    random = np.random.default_rng(tokens)
    ids = choices(tokens, each, experts, outside=True, dtype=dtype)
    x = random.integers(0, 256, (tokens, row_bytes)).astype(np.uint8)
    scales = random.standard_normal((tokens, scale_cols)).astype(np.float32)
    want_offs, want_inverse, of = placed(ids, experts)
    with emulator.watch() as memory:
        source, index = matrix(memory, x, row_bytes + gap), memory.array(ids)
        rows = empty(memory, (ids.size, row_bytes), np.uint8)
        offs, inverse = memory.empty((experts,), np.int32), memory.empty(ids.shape, np.int32)
        given, taken = (0, 0), (0, 0)
        strides: tuple[int, ...] = (0, 0, 0, 0)
        if scale_cols:
            given, taken = matrix(memory, scales), empty(memory, (scale_cols, ids.size), np.float32)
            strides = (scale_cols, 1, 1, ids.size)  # by rows before, by columns after
        pointers = [x.pointer if scale_cols else 0 for x in (given, taken)]
        problem = MoePermute(
            *(target, str(ids.dtype), experts, each, row_bytes, 4 * bool(scale_cols)), alignment(source, rows)
        )
        counts = memory.empty((counts_bytes(problem, tokens) // 4,), np.int32)
        for kernel, launch in plans(MOE_PERMUTE, problem):
            launch(
                *(0, source.pointer, source.stride, pointers[0], scale_cols, *strides[:2]),
                *(index.ctypes.data, tokens, rows.pointer, pointers[1], *strides[2:]),
                *(offs.ctypes.data, inverse.ctypes.data, counts.ctypes.data),
            )
            same_bytes(offs, want_offs, f"{kernel}: offs")
            same_bytes(inverse, want_inverse, f"{kernel}: inverse")
            same_bytes(rows.values[: len(of)], x[of], f"{kernel}: rows")
            if scale_cols:
                same_bytes(taken.values.T[: len(of)], scales[of], f"{kernel}: scales")


@pytest.mark.parametrize(
    ("target", "tokens", "each", "cols", "gap", "y", "weights", "out"),
    [
        (CUDA, 5, 8, 264, 0, "bfloat16", "float32", "bfloat16"),
        (CUDA, 9, 11, 33, 0, "float16", "", "float32"),
        (CUDA, 40, 2, 64, 8, "float32", "bfloat16", "float16"),
        (HIP_64, 40, 3, 72, 0, "bfloat16", "bfloat16", "bfloat16"),
        (HIP_64, 3, 2, 7, 0, "float32", "float16", "float32"),
        (HIP_32, 6, 4, 520, 4, "float16", "float32", "bfloat16"),
        (CUDA, 5, 2, 0, 0, "bfloat16", "float32", "bfloat16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("at_once", [unpermute.BLOCKS_AT_ONCE, 0], ids=["few blocks", "many blocks"])
def test_unpermute_sums_the_weighted_rows_of_each_token(
    emulator, monkeypatch, at_once, target, tokens, each, cols, gap, y, weights, out
):
    monkeypatch.setattr(unpermute, "BLOCKS_AT_ONCE", at_once)
    rows = tokens * each
    given = fresh((rows, cols), y)
    places = placed(choices(tokens, each, 20, outside=True), 20)[1]
    places[0, 0] = rows
    shares = fresh((tokens, each), weights, spread=1) if weights else None
    with emulator.watch() as memory:
        source, result = matrix(memory, given, cols + gap), empty(memory, (tokens, cols), FLOATS[out], cols + gap)
        index = memory.array(places)
        held = None if shares is None else memory.array(shares)
        aligned = alignment(source, result)
        size, wanted = FLOATS[y].itemsize, FLOATS[out].itemsize
        aligned = min(aligned, 16 * size // wanted)
        problem = MoeUnpermute(target, y, weights, out, each, cols, aligned)
        for kernel, launch in plans(MOE_UNPERMUTE, problem):
            launch(
                *(0, source.pointer, source.stride, rows, index.ctypes.data, 0 if held is None else held.ctypes.data),
                *(tokens, result.pointer, result.stride),
            )
            same_bytes(result.values, summed(given, places, shares, out), kernel)
