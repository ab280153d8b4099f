"""Quantization and dequantization of a matrix on the host."""

from functools import partial
from typing import Final, NamedTuple

import numpy as np

from fp8core.dtypes import FORMATS
from fp8core.host.codes import (
    SMALLEST_NORMAL,
    decode_table,
    encode,
    look_up,
    reciprocal,
    replace,
    widen,
    without_subnormals,
)
from fp8core.host.memory import Array, Codes, Floats, Workspace, matrix, storage, vector
from fp8core.host.tiles import panels, tiles
from fp8core.problem import PER_TENSOR, PER_TOKEN, Dequantize, GroupShape, NormQuantize, Quantize, SiluQuantize
from fp8core.runtime.plans import DequantizeNumbers, Plan, QuantizeNumbers

Producer = Quantize | NormQuantize | SiluQuantize

SUBNORMALS_MATTER: Final = np.float32(2.0**-100)
"""Numbers below 2**-126 divided by a scale of at least this size become zero in every format."""


SHORT: Final = 1024
"""Rows of at most this many numbers are reduced faster in one call for all rows than one by one."""

WORTH_A_TABLE: Final = 1 << 19
"""From this many 16-bit numbers with one scale on, it is faster to convert all 65,536 patterns and look them up."""


class Limits(NamedTuple):
    """Bounds of a group's amax before it becomes a scale."""

    upper: np.float32
    """The upper bound of amax per token; infinite if there is none."""
    eps: np.float32
    """The lower bound of amax for groups, blocks and columns."""

    @classmethod
    def given(cls, upper: int, upper_value: float, eps: float) -> "Limits":
        """Return the limits of a launch: ``upper`` is the address of the upper bound, or 0 if it is ``upper_value``."""
        return cls(vector(upper, "float32", 1)[0] if upper else np.float32(upper_value), np.float32(eps))


def magnitudes(x: Array, work: Workspace) -> Array:
    """Return the magnitudes of ``x``, an array of the bits of numbers, in ``work.bits``.

    Bits of non-negative numbers have the same order as the numbers. Comparing bits is three times as fast as comparing
    fp32, and six times with 16 bits. NaN is above all numbers.
    """
    found: Array = work.bits.view(x.dtype)[: x.size].reshape(x.shape)
    np.bitwise_and(x, (1 << 8 * x.itemsize - 1) - 1, out=found)
    return found


def largest(found: Array) -> Array:
    """Return the largest numbers along the last axis of contiguous ``[rows, groups, columns]``."""
    rows, groups, cols = found.shape
    of_groups: Array
    if cols > SHORT:
        of_groups = np.maximum.reduce(found, axis=2)
    else:
        of_groups = np.maximum.reduceat(found.reshape(-1), np.arange(0, found.size, cols)).reshape(rows, groups)
    return of_groups


def fold(of_rows: Array, rows: slice, group_rows: int) -> Array:
    """Return the largest number of each column in every group of rows; ``of_rows`` has the numbers of ``rows``."""
    step = rows.stop if group_rows < 0 else group_rows
    starts = np.maximum(np.arange(rows.start // step * step, rows.stop, step) - rows.start, 0)
    if len(starts) == 1:
        return np.maximum.reduce(of_rows, axis=0, keepdims=True)  # many times as fast as reduceat
    return np.maximum.reduceat(of_rows, starts, axis=0)


def group_amax(x: Array, group_shape: GroupShape, work: Workspace) -> Floats:
    """Return the largest magnitude of every group of ``x``; NaN is ignored."""
    bits = x.view(f"u{x.itemsize}")
    found = largest_bits(bits, group_shape, work, None)
    infinity = np.array(np.inf, x.dtype).view(bits.dtype)
    if (found > infinity).any():
        found = largest_bits(bits, group_shape, work, infinity)
    amax: Floats = found.view(x.dtype).astype(np.float32)
    return amax


def largest_bits(x: Array, group_shape: GroupShape, work: Workspace, most: Array | None) -> Array:
    """Return the largest of the `magnitudes` of every group, ignoring those above ``most``; 0 if all are ignored."""
    found = np.zeros(group_shape.scale_shape(*x.shape), x.dtype)
    for tile in tiles(x.shape, group_shape):
        part = magnitudes(x[tile.rows, tile.cols], work)
        if most is not None:
            part[part > most] = 0
        split = tile.split(part)
        of_rows = largest(split) if split.shape[2] > 1 else part
        if group_shape.rows != 1:
            of_rows = fold(of_rows, tile.rows, group_shape.rows)
        into = found[tile.row_groups(group_shape.rows), tile.groups]
        np.maximum(into, of_rows, out=into)
    return found


def scales_of(amax: Floats, group_shape: GroupShape, dtype: str, powers_of_two: bool, limits: Limits) -> Array:
    """Return the fp32 scales for ``amax`` by the formulas of each granularity."""
    maximum = np.float32(FORMATS[dtype].maximum)
    scales: Array
    if group_shape == PER_TENSOR:
        scales = np.maximum(amax / maximum, SMALLEST_NORMAL)
    elif group_shape == PER_TOKEN:
        scales = np.maximum(np.fmin(amax, limits.upper) / maximum, np.float32(1) / (maximum * np.float32(512)))
    else:
        scales = np.maximum(amax, limits.eps) / maximum
    return up_to_powers_of_two(scales) if powers_of_two else scales


def up_to_powers_of_two(scales: Array) -> Array:
    """Return fp32 scales rounded up to powers of two."""
    # The carry out of the mantissa adds one to the exponent unless the mantissa is zero.
    return ((scales.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)).view(np.float32)


def convert(x: Array, scales: Floats, problem: Producer, codes: Codes, work: Workspace) -> None:
    """Write the codes of ``x``, divided by ``scales`` or multiplied by their rounded reciprocals."""
    if scales.size == 1 and x.itemsize == 2 and x.size >= WORTH_A_TABLE:
        every = np.arange(1 << 16, dtype=np.uint16).reshape(1, -1)
        table = np.empty(every.shape, np.uint8)
        convert(every.view(x.dtype), scales, problem, table, work)
        replace(x.view(np.uint16), table[0], codes, work)
        return
    multiplied = problem.static or problem.group_shape == PER_TENSOR
    group_shape = PER_TENSOR if scales.size == 1 else problem.group_shape
    factors = reciprocal(scales) if multiplied else scales
    tiny = bool((np.abs(scales) < SUBNORMALS_MATTER).any())
    for tile in tiles(x.shape, group_shape):
        part = widen(x[tile.rows, tile.cols], work)
        if tiny:
            part = without_subnormals(part, work)
        values = work.wide[: part.size].reshape(part.shape)
        factor = tile.scales(factors, group_shape.rows)
        (np.multiply if multiplied else np.divide)(tile.split(part), factor, out=tile.split(values))
        encode(values, problem.data, codes[tile.rows, tile.cols], work)


def quantize_rows(x: Array, problem: Producer, codes: Codes, scales: Array, limits: Limits, work: Workspace) -> None:
    """Quantize the matrix ``x`` to ``codes``; reads the scales if the problem is static, otherwise writes them.

    ``x`` has to begin with the first row of a group.
    """
    for rows, groups in panels(x.shape, problem.group_shape.rows):
        here = scales[groups]
        if problem.static:
            values = here.astype(np.float32)
        else:
            powers_of_two = problem.scale_format != "float32"
            amax = group_amax(x[rows], problem.group_shape, work)
            values = scales_of(amax, problem.group_shape, problem.data, powers_of_two, limits)
            if problem.scale_format == "ue8m0_bytes":
                here.view(np.uint8)[...] = values.view(np.uint32) >> 23
            else:
                here[...] = values
        convert(x[rows], values, problem, codes[rows], work)


def scale_dtype(scale_format: str) -> str:
    """Return the dtype that scales of a format are stored in."""
    return "float8_e8m0fnu" if scale_format == "ue8m0_bytes" else "float32"


def plan_quantize(problem: Quantize) -> Plan[QuantizeNumbers]:
    """Return the plan of ``data, scale = quantize(x)``: the formulas of `fp8core.quantize`, bit for bit."""
    group_shape, cols = problem.group_shape, problem.cols
    kept = scale_dtype(problem.scale_format)

    @np.errstate(all="ignore")
    def launch(n: QuantizeNumbers, _stream: int, x: int, data: int, scale: int, upper: int) -> None:
        """Quantize ``[rows, cols]``; rows from ``rows`` to ``rows_padded`` become zeros with scale 1."""
        rows, rows_padded = n.rows, n.rows_padded
        source = matrix(x, problem.x, (rows, cols), (n.x_stride, 1))
        codes = matrix(data, problem.data, (rows_padded, cols), (n.data_stride, 1))
        grid = group_shape.scale_shape(rows_padded, cols)
        scales = matrix(scale, kept, grid, (n.scale_row_stride, n.scale_col_stride))
        work, limits = Workspace.of(source.size), Limits.given(upper, n.upper_value, n.eps)
        used = group_shape.scale_shape(rows, cols)[0]
        if rows < rows_padded:
            codes[rows:] = 0
            if rows == 0 and group_shape != PER_TENSOR:
                used = 0
            if not problem.static:
                scales[used:] = 1
        if group_shape == PER_TENSOR and n.x_stride == n.data_stride == cols:
            source, codes = source.reshape(1, -1), codes[:rows].reshape(1, -1)
        if used:
            quantize_rows(source, problem, codes[: len(source)], scales[:used], limits, work)

    return Plan(QuantizeNumbers, lambda numbers: partial(launch, numbers))


def plan_dequantize(problem: Dequantize) -> Plan[DequantizeNumbers]:
    """Return the plan of ``out = q * scale``: the product in fp32, rounded once to the dtype of ``out``."""
    table, group_shape, cols = decode_table(problem.q), problem.group_shape, problem.cols
    kept = scale_dtype(problem.scale_format)

    @np.errstate(all="ignore")
    def launch(n: DequantizeNumbers, _stream: int, q: int, scale: int, out: int) -> None:
        """Dequantize ``[rows, cols]``."""
        rows = n.rows
        codes = matrix(q, problem.q, (rows, cols), (n.q_stride, 1))
        result = matrix(out, problem.out, (rows, cols), (n.out_stride, 1))
        grid = group_shape.scale_shape(rows, cols)
        scales = matrix(scale, kept, grid, (n.scale_row_stride, n.scale_col_stride))
        work = Workspace.of(codes.size)
        if group_shape == PER_TENSOR:
            products = (table * scales.astype(np.float32)[0, 0]).astype(storage(problem.out))
            if n.q_stride == n.out_stride == cols:
                codes, result = codes.reshape(1, -1), result.reshape(1, -1)
            replace(codes, products, result, work)
            return
        for rows_of, groups in panels(codes.shape, group_shape.rows):
            values = scales[groups].astype(np.float32)
            part, into = codes[rows_of], result[rows_of]
            for tile in tiles(part.shape, group_shape):
                given = part[tile.rows, tile.cols]
                numbers = work.wide[: given.size].reshape(given.shape)
                look_up(table, given, numbers, work)
                split = tile.split(numbers)
                np.multiply(split, tile.scales(values, group_shape.rows), out=split)
                into[tile.rows, tile.cols] = numbers

    return Plan(DequantizeNumbers, lambda numbers: partial(launch, numbers))
