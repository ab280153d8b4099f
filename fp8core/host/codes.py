"""From fp32 to the codes of the FP8 formats and back, by tables that are made when they are first used.

fp32 to FP8 takes one lookup in a table of all 65,536 upper halves of fp32 numbers: the lower half is
folded into the last bit of the upper one (rounding to odd), after which the upper half is on the same side
of every number that has at most six bits of mantissa, and so of every midpoint between two FP8 values.
"""

from functools import cache
from typing import Final

import ml_dtypes
import numpy as np

from fp8core.host.memory import Array, Codes, Floats, Workspace
from fp8core.host.tiles import tiles
from fp8core.problem import FORMATS, PER_TENSOR

SMALLEST_NORMAL: Final = np.float32(2.0**-126)
ONE: Final = np.float32(1.0)


@cache
def decode_table(dtype: str) -> Floats:
    """Return the fp32 numbers of the 256 codes of an FP8 format; read-only."""
    table: Floats = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float32)
    table.flags.writeable = False
    return table


@cache
def encode_table(dtype: str) -> Codes:
    """Return the codes of all 65,536 bf16 patterns: clamped to the quantization maximum, nearest even; read-only."""
    fmt = FORMATS[dtype]
    numbers = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    # ml_dtypes does not saturate, so numbers are clamped before the cast; its NaN bytes differ by format and sign.
    clamped = np.clip(np.nan_to_num(numbers, nan=0.0), -fmt.maximum, fmt.maximum)
    table: Codes = clamped.astype(getattr(ml_dtypes, dtype)).view(np.uint8)
    table[np.isnan(numbers)] = fmt.nan
    table.flags.writeable = False
    return table


@cache
def half_table() -> Floats:
    """Return the fp32 numbers of all 65,536 fp16 patterns; read-only."""
    table: Floats = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    table.flags.writeable = False
    return table


def look_up(table: Array, index: Array, out: Array, work: Workspace) -> None:
    """Write ``table[index]`` to ``out``; index and out have one shape, and out may be index's memory."""
    places = work.index[: index.size].reshape(index.shape)
    places[...] = index
    if out.flags.c_contiguous:
        np.take(table, places, mode="wrap", out=out)  # "clip" is the one mode that writes to out without a buffer
    else:
        out[...] = np.take(table, places, mode="wrap")


def replace(codes: Array, table: Array, out: Array, work: Workspace) -> None:
    """Write ``table[codes]`` of whole matrices to ``out``, which may be the memory of ``codes``."""
    for tile in tiles(codes.shape, PER_TENSOR):
        look_up(table, codes[tile.rows, tile.cols], out[tile.rows, tile.cols], work)


def encode(values: Floats, dtype: str, out: Codes, work: Workspace) -> None:
    """Write the codes of contiguous fp32 ``values`` to ``out``: clamped to the maximum, to nearest even, NaN kept."""
    bits = values.view(np.uint32)
    folded = work.bits[: values.size].reshape(values.shape)
    np.bitwise_and(bits, 0xFFFF, out=folded)
    np.add(folded, 0xFFFF, out=folded)
    np.bitwise_or(folded, bits, out=folded)
    np.right_shift(folded, 16, out=folded)
    look_up(encode_table(dtype), folded, out, work)


def widen(x: Array, work: Workspace) -> Floats:
    """Return ``x`` (fp32, fp16 or bf16) in fp32: itself, or its numbers in ``work.wide``."""
    if x.dtype == np.float32:
        return x
    wide = work.wide[: x.size].reshape(x.shape)
    if x.dtype == np.float16:
        look_up(half_table(), x.view(np.uint16), wide, work)  # twice as fast as NumPy's cast
    else:
        wide[...] = x
    return wide


def without_subnormals(x: Floats, work: Workspace) -> Floats:
    """Return ``x`` in ``work.wide`` with numbers below 2**-126 as zeros of their sign."""
    wide = work.wide[: x.size].reshape(x.shape)
    wide[...] = x
    np.multiply(wide, np.float32(0), out=wide, where=np.abs(wide) < SMALLEST_NORMAL)
    return wide


def reciprocal(scale: Floats) -> Floats:
    """Return ``1 / scale``, rounded once."""
    return np.divide(ONE, scale, dtype=np.float32)
