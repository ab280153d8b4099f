"""Operands in every mode of scales, and their exact products."""

import numpy as np

from support import reference
from support.engines import fresh_fp8, fresh_scale

EXACT, FAST = 2.0e-3, 3.0e-3
"""Bounds of the relative Frobenius error of a bfloat16 result, without and with fast accumulation (spec, section 5)."""
MODES = ("tensor-tensor", "row-row", "tensor-row", "row-tensor", "group-block", "group-group")
ODD = ((1, 7, 5), (3, 100, 96), (17, 130, 257), (5, 1, 640), (2, 16, 1))
EVEN = ((1, 256, 512), (16, 512, 256), (83, 384, 1024), (64, 1024, 384), (130, 128, 128), (33, 272, 144))


def ceil(a, b):
    return -(-a // b)


def scales_for(mode, m, n, k, low=0.001):
    """Return the scales of a mode (scale_b in b's orientation), and both expanded to one scale per element."""
    a_kind, b_kind = mode.split("-")
    groups, blocks = ceil(k, 128), ceil(n, 128)
    a_shape = {"tensor": (1,), "row": (m, 1), "group": (m, groups)}[a_kind]
    b_shape = {"tensor": (1,), "row": (1, n), "block": (groups, blocks), "group": (groups, n)}[b_kind]
    a, b = fresh_scale(a_shape, low=low, salt=1), fresh_scale(b_shape, low=low, salt=2)
    wide_a = np.broadcast_to(a, (m, 1)) if a_kind == "tensor" else a
    wide_a = np.repeat(wide_a, 128, 1)[:, :k] if a_kind == "group" else wide_a
    wide_b = np.broadcast_to(b, (1, n)) if b_kind == "tensor" else b
    wide_b = np.repeat(wide_b, 128, 0)[:k] if b_kind in ("block", "group") else wide_b
    wide_b = np.repeat(wide_b, 128, 1)[:, :n] if b_kind == "block" else wide_b
    return a, b, wide_a, wide_b


def operands(m, n, k, mode, a_dtype="float8_e4m3fn", b_dtype="float8_e4m3fn", low=0.001):
    """Return a, the stored weight, the scales and the exact product without bias."""
    a, weight = fresh_fp8((m, k), a_dtype, salt=1), fresh_fp8((n, k), b_dtype, salt=2)
    scale_a, scale_b, wide_a, wide_b = scales_for(mode, m, n, k, low)
    exact = reference.scaled_mm(
        reference.decode(a.view(np.uint8), a_dtype), reference.decode(weight.view(np.uint8), b_dtype).T, wide_a, wide_b
    )
    return a, weight, scale_a, scale_b, exact
