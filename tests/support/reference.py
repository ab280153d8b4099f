"""A naive oracle, written from the specification: slow, simple, and without code shared with the package.

Encoding searches the nearest number in the list of all numbers of a format, so no conversion algorithm
is repeated here. All functions take and return NumPy arrays; FP8 data are ``uint8`` codes.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np

MAX = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 224.0, "float8_e5m2": 57344.0, "float8_e5m2fnuz": 57344.0}
NAN = {"float8_e4m3fn": 0x7F, "float8_e4m3fnuz": 0x80, "float8_e5m2": 0x7F, "float8_e5m2fnuz": 0x80}
SMALLEST_NORMAL = np.float32(2.0**-126)


def value_of(code: int, dtype: str) -> float:
    """Return the number that a byte stands for, by the definition of its format."""
    sign = -1.0 if code & 0x80 else 1.0
    mantissa_bits, bias = {
        "float8_e4m3fn": (3, 7),
        "float8_e4m3fnuz": (3, 8),
        "float8_e5m2": (2, 15),
        "float8_e5m2fnuz": (2, 16),
    }[dtype]
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    if dtype.endswith("fnuz"):
        if code == 0x80:
            return float("nan")
    elif dtype == "float8_e4m3fn":
        if code & 0x7F == 0x7F:
            return float("nan")
    elif exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


@cache
def values(dtype: str) -> np.ndarray:
    """Return the numbers of all 256 bytes."""
    return np.array([value_of(code, dtype) for code in range(256)], np.float64)


@cache
def magnitudes(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the finite non-negative numbers of a format in ascending order, and their codes."""
    finite = sorted((value, code) for code, value in enumerate(values(dtype)[:128]) if np.isfinite(value))
    return np.array([value for value, _ in finite], np.float64), np.array([code for _, code in finite], np.uint8)


def decode(codes: np.ndarray, dtype: str) -> np.ndarray:
    """Return the fp32 numbers of ``codes``."""
    return values(dtype).astype(np.float32)[codes]


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the codes of fp32 ``values``, clamped to the quantization maximum and rounded to nearest even."""
    numbers, bytes_ = magnitudes(dtype)
    exact = np.minimum(np.abs(values.astype(np.float64)), MAX[dtype])
    upper = np.searchsorted(numbers, np.where(np.isnan(exact), 0.0, exact))
    lower = np.maximum(upper - 1, 0)
    below, above = np.nan_to_num(exact) - numbers[lower], numbers[upper] - np.nan_to_num(exact)
    even = bytes_[lower] % 2 == 0
    codes = bytes_[np.where((below < above) | ((below == above) & even), lower, upper)]
    negative = np.signbit(values)
    if dtype.endswith("fnuz"):
        negative &= codes != 0
    codes = np.where(negative, codes | 0x80, codes).astype(np.uint8)
    codes[np.isnan(values)] = NAN[dtype]
    return codes


def widened(x: np.ndarray) -> np.ndarray:
    """Return ``x`` in fp32, with subnormal numbers replaced by zeros of the same sign."""
    wide = x.astype(np.float32)
    return np.where(np.abs(wide) < SMALLEST_NORMAL, np.copysign(np.float32(0), wide), wide)


def power_of_two_above(scale: np.ndarray) -> np.ndarray:
    """Return scales rounded up to powers of two, the smallest of which is 2**-126; 0 and infinity stay."""
    fraction, exponent = np.frexp(scale)
    above = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
    return np.where((scale == 0) | np.isinf(scale), scale, np.fmax(above, SMALLEST_NORMAL))


def spread(scale: np.ndarray, group_shape: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """Return one scale per element, from one scale per group."""
    rows, cols = shape
    group_rows, group_cols = (
        rows if group_shape[0] < 0 else group_shape[0],
        cols if group_shape[1] < 0 else group_shape[1],
    )
    full = np.repeat(np.repeat(scale, max(group_rows, 1), 0), max(group_cols, 1), 1)
    return full[:rows, :cols]


class Quantized(NamedTuple):
    """Codes and scales, regardless of the scale layout."""

    codes: np.ndarray
    scale: np.ndarray


def quantize(
    x: np.ndarray,
    dtype: str = "float8_e4m3fn",
    group_shape: tuple[int, int] = (1, -1),
    scale: np.ndarray | None = None,
    scale_ub: float | None = None,
    scale_format: str = "float32",
    eps: float = 1e-10,
    rows_padded: int | None = None,
) -> Quantized:
    """Quantize a matrix by section 3 of the specification, group by group."""
    with np.errstate(all="ignore"):
        return _quantize(x, dtype, tuple(group_shape), scale, scale_ub, scale_format, eps, rows_padded)


def _quantize(x, dtype, group_shape, scale, scale_ub, scale_format, eps, rows_padded):
    wide = widened(x)
    rows, cols = wide.shape
    total = max(rows, rows_padded or 0)
    group_rows = total if group_shape[0] < 0 else group_shape[0]
    group_cols = cols if group_shape[1] < 0 else group_shape[1]
    largest = np.float32(MAX[dtype])
    grid = (-(-total // group_rows) if total else 0, -(-cols // group_cols) if cols else 0)
    if group_shape[0] < 0:
        grid = (1, grid[1])
    if group_shape[1] < 0:
        grid = (grid[0], 1)
    scales = np.ones(grid, np.float32)
    scaled = np.zeros((total, cols), np.float32)
    for i in range(grid[0]):
        for j in range(grid[1]):
            where = slice(i * group_rows, min((i + 1) * group_rows, rows)), slice(j * group_cols, (j + 1) * group_cols)
            group = wide[where]
            if group_shape != (-1, -1) and i * group_rows >= rows and total > rows:
                continue  # padding rows keep zeros and scale 1
            if scale is not None:
                s = np.float32(np.broadcast_to(scale, grid)[i, j])
                scaled[where] = group * (np.float32(1) / s)
            else:
                # not np.fmax, which mishandles signaling NaN
                amax = np.max(np.abs(group), initial=np.float32(0), where=~np.isnan(group))
                if group_shape == (-1, -1):
                    s = np.fmax(amax / largest, SMALLEST_NORMAL)
                elif group_shape == (1, -1):
                    amax = amax if scale_ub is None else np.fmin(amax, np.float32(scale_ub))
                    s = np.fmax(amax / largest, np.float32(1) / (largest * np.float32(512)))
                else:
                    s = np.fmax(amax, np.float32(eps)) / largest
                if scale_format != "float32":
                    s = power_of_two_above(np.array(s))[()]
                scaled[where] = group * (np.float32(1) / s) if group_shape == (-1, -1) else group / s
            scales[i, j] = s
    codes = encode(scaled, dtype)  # zeros have code 0
    if scale_format == "ue8m0_bytes":
        return Quantized(codes, (scales.view(np.uint32) >> 23).astype(np.uint8))
    return Quantized(codes, scales)


def dequantize(codes: np.ndarray, dtype: str, scale: np.ndarray, group_shape: tuple[int, int]) -> np.ndarray:
    """Return ``float(code) * scale`` in fp32; the caller rounds it to the result's dtype."""
    with np.errstate(all="ignore"):
        return decode(codes, dtype) * spread(np.asarray(scale, np.float32), group_shape, codes.shape)


def fused_on_disk(scales: np.ndarray) -> bool:
    """Return whether scales of shards after the first are placeholders of scales that were never loaded."""
    return bool((scales[1:] <= -448).any())


def expand(scales: np.ndarray, widths: list[int]) -> np.ndarray:
    """Return the scale of each row of fused shards (section 4)."""
    scales = np.asarray(scales, np.float32).reshape(-1)
    each = np.broadcast_to(scales[:1] if fused_on_disk(scales) else scales, len(widths))
    return np.repeat(each, widths)[:, None]


def requantize(codes: np.ndarray, dtype: str, scales: np.ndarray, widths: list[int]) -> tuple[np.float32, np.ndarray]:
    """Return the largest scale of fused shards, and the shards' codes at that scale (section 4)."""
    scales = np.asarray(scales, np.float32).reshape(-1)
    if scales.size == 1 or fused_on_disk(scales):
        return scales[0], codes.copy()
    largest, out, start = scales.max(), codes.copy(), 0
    if not SMALLEST_NORMAL <= abs(largest) < np.inf:
        return largest, out
    for scale, width in zip(scales, widths, strict=True):
        shard = slice(start, start + width)
        start += width
        if scale != largest:
            with np.errstate(all="ignore"):
                out[shard] = encode(decode(codes[shard], dtype) * scale * (np.float32(1) / largest), dtype)
    return largest, out


def fn_to_fnuz(code: int) -> int:
    """Return the fnuz code of half an fn code's number, from the list of all numbers (scales double); NaN stays NaN."""
    value = value_of(code, "float8_e4m3fn") / 2
    if np.isnan(value):
        return 0x80
    return next(c for c in range(256) if value_of(c, "float8_e4m3fnuz") == value)


def fnuz_to_fn(code: int) -> int:
    """Return the fn code nearest to twice a fnuz code's number (scales halve); NaN becomes 0x7f."""
    value = value_of(code, "float8_e4m3fnuz") * 2
    if np.isnan(value):
        return 0x7F
    numbers = {c: value_of(c, "float8_e4m3fn") for c in range(256) if not np.isnan(value_of(c, "float8_e4m3fn"))}
    return min(numbers, key=lambda c: (abs(numbers[c] - value), c))


def silu(x: np.ndarray) -> np.ndarray:
    """Return ``x * sigmoid(x)`` of fp32 numbers, computed in float64."""
    wide = x.astype(np.float64)
    return wide / (1 + np.exp(-wide))


def gates_near_ties(slack: int) -> tuple[np.ndarray, np.ndarray]:
    """Return float16 gates whose SiLU is within 6 fp32 ulp of a rounding tie, and their rounded fp32 results.

    Gates whose result would change if the exponential were off by ``slack`` ulp are left out.
    """
    gate = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    gate = gate[np.isfinite(gate) & (np.abs(gate.astype(np.float32)) < 20) & (np.abs(gate.astype(np.float32)) > 1e-4)]
    wide = gate.astype(np.float32)
    exact, power = silu(gate).astype(np.float32), np.exp(-wide.astype(np.float64)).astype(np.float32)

    def rounded(e: np.ndarray) -> np.ndarray:
        return (wide / (np.float32(1) + e)).astype(gate.dtype)

    sure = [rounded((power.view(np.int32) + off).view(np.float32)) for off in (-slack, slack)]
    moved = [(exact.view(np.int32) + off).view(np.float32).astype(gate.dtype) for off in (-6, 6)]
    chosen = (sure[0] == sure[1]) & (moved[0] != moved[1])
    return gate[chosen], rounded(power)[chosen]


def add(x: np.ndarray, residual: np.ndarray, rounded: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum to be normed (in fp32 or, if ``rounded``, as stored), and the new residual."""
    total = x.astype(np.float32) + residual.astype(np.float32)
    stored = total.astype(residual.dtype)
    return (stored.astype(np.float32) if rounded else total), stored


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """Return the RMS norm of each row, computed in float64."""
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + epsilon) * weight.astype(np.float64)


def scaled_mm(
    a: np.ndarray, b: np.ndarray, scale_a: np.ndarray, scale_b: np.ndarray, bias: np.ndarray | None = None
) -> np.ndarray:
    """Return ``(a * scale_a) @ (b * scale_b)`` in float64, from decoded matrices and scales that broadcast to them."""
    product = (a.astype(np.float64) * scale_a) @ (b.astype(np.float64) * scale_b)
    return product if bias is None else product + bias.astype(np.float64)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the Frobenius norm of the error over that of the exact result; a NaN makes it infinite."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    norm = float(np.linalg.norm(want))
    error = float(np.linalg.norm(got - want)) / (norm or 1.0)
    return error if np.isfinite(error) else float("inf")


@np.errstate(over="ignore")
def activated(x: np.ndarray, activation: str | None) -> np.ndarray:
    """Return an activation of ``torch.nn.functional`` in float64 ("gelu_tanh": ``approximate="tanh"``)."""
    x = x.astype(np.float64)
    if activation == "gelu":
        return x * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2)) / 2
    if activation == "gelu_tanh":
        return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))  # 1 + tanh(u) cancels at small x
    return x / (1 + np.exp(-x)) if activation == "silu" else x
