"""Converts fp32 numbers to FP8 codes and back, with tables that are made at first use.

A conversion to FP8 is one lookup in a table of all 65,536 upper halves of fp32 numbers. Before it, the lower half is
folded into the last bit of the upper half (rounding to odd). Compared with any value of at most six mantissa bits, and
so with any midpoint between two FP8 values, the upper half then lies on the same side as the original number.
"""

from functools import cache, lru_cache
from typing import Final

import ml_dtypes
import numpy as np

from fp8core.dtypes import FORMATS
from fp8core.host.memory import Array, Codes, Floats, Workspace
from fp8core.host.tiles import tiles
from fp8core.problem import PER_TENSOR

WORTH_PAIRS: Final = 1 << 19
"""From this many codes on, it is faster to make a table of pairs of codes than to look up each code."""
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
    # ml_dtypes does not saturate, so clamp before the cast; its NaN bytes depend on format and sign.
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
    """Write ``table[index]`` to ``out``, which has the shape of ``index`` and may share its memory."""
    places = work.index[: index.size].reshape(index.shape)
    places[...] = index
    if out.flags.c_contiguous:
        np.take(table, places, mode="wrap", out=out)  # mode "raise" would write to out through a buffer
    else:
        out[...] = np.take(table, places, mode="wrap")


@lru_cache(maxsize=8)
def _pairs(table: bytes, itemsize: int) -> Array:
    """Return a table for all 65,536 pairs of codes: the two numbers of each pair, stored as one; read-only."""
    numbers = np.frombuffer(table, f"u{itemsize}")
    codes = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    pairs = numbers[codes].view(f"u{2 * itemsize}")
    pairs.flags.writeable = False
    return pairs


def replace(codes: Array, table: Array, out: Array, work: Workspace) -> None:
    """Write ``table[codes]`` to ``out`` for whole matrices; ``out`` may be the memory of ``codes``."""
    if codes.itemsize == 1 and codes.size >= WORTH_PAIRS and codes.shape[1] % 2 == 0:
        table = _pairs(table.tobytes(), table.itemsize)
        codes, out = codes.view(np.uint16), out.view(table.dtype)
    for tile in tiles(codes.shape, PER_TENSOR):
        look_up(table, codes[tile.rows, tile.cols], out[tile.rows, tile.cols], work)


def encode(values: Floats, dtype: str, out: Codes, work: Workspace) -> None:
    """Write the codes of contiguous fp32 ``values`` to ``out``: clamped, rounded to nearest even, NaN kept."""
    bits = values.view(np.uint32)
    folded = work.bits[: values.size].reshape(values.shape)
    np.bitwise_and(bits, 0xFFFF, out=folded)
    np.add(folded, 0xFFFF, out=folded)
    np.bitwise_or(folded, bits, out=folded)
    np.right_shift(folded, 16, out=folded)
    look_up(encode_table(dtype), folded, out, work)


def widen(x: Array, work: Workspace) -> Floats:
    """Return ``x`` (fp32, fp16 or bf16) in fp32: x itself, or converted into ``work.wide``."""
    if x.dtype == np.float32:
        return x
    wide = work.wide[: x.size].reshape(x.shape)
    if x.dtype == np.float16:
        look_up(half_table(), x.view(np.uint16), wide, work)  # twice as fast as NumPy's cast
    else:
        wide[...] = x
    return wide


def without_subnormals(x: Floats, work: Workspace) -> Floats:
    """Copy ``x`` to ``work.wide`` with numbers of magnitude below 2**-126 replaced by zeros of the same sign."""
    wide = work.wide[: x.size].reshape(x.shape)
    wide[...] = x
    np.multiply(wide, np.float32(0), out=wide, where=np.abs(wide) < SMALLEST_NORMAL)
    return wide


def reciprocal(scale: Floats) -> Floats:
    """Return ``1 / scale``, rounded once."""
    return np.divide(ONE, scale, dtype=np.float32)
