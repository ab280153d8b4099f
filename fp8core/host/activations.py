"""Activations of products on the host, in fp32, by the formulas of ``cuda_src/gemm/epilogue.cuh``."""

import math
from typing import Final

import numpy as np

from fp8core.host.codes import ONE, SMALLEST_NORMAL
from fp8core.host.memory import Floats
from fp8core.problem import Activation

TAIL: Final = tuple(
    np.float32(float.fromhex(number))
    for number in (
        "0x1.243fa4p-5",
        "-0x1.41f3e8p-3",
        "0x1.a69d08p-3",
        "-0x1.b7c806p-5",
        "0x1.074b7ap-3",
        "0x1.993ecep-4",
        "0x1.ee9bb6p-4",
        "0x1.ea006ap-4",
    )
)
"""The polynomial of `normal_tail`, its highest power first."""


def flushed(x: Floats) -> Floats:
    """Return x with subnormal numbers replaced by zeros, as on GPUs and on XLA's threads."""
    made: Floats = np.where(np.abs(x) < SMALLEST_NORMAL, x * np.float32(0), x)
    return made


def times_logistic(x: Floats, y: Floats) -> Floats:
    """Return ``x / (1 + exp(-y))``."""
    return flushed(np.divide(x, np.exp(-y) + ONE))


def normal_tail(y: Floats) -> Floats:
    """Return the probability that a standard normal variable is below ``-y``, for y of at least 0.

    It is ``t * p(t) * exp(-y * y / 2)`` with ``t = 1 / (1 + 0.3 * y)``; the polynomial p is fitted to a relative error
    below 2**-22 for y up to 14.
    """
    t: Floats = np.divide(ONE, ONE + np.float32(0.3) * y)
    p: Floats = np.full_like(t, TAIL[0])
    for number in TAIL[1:]:
        p = p * t + number
    return flushed(p * t * flushed(np.exp(y * y * np.float32(-0.5))))


def activated(x: Floats, activation: Activation) -> Floats:
    """Apply an activation to ``x``."""
    if activation == "silu":
        return times_logistic(x, x)
    if activation == "gelu_tanh":
        factor = np.float32(2 * math.sqrt(2 / math.pi))
        return times_logistic(x, factor * (x + np.float32(0.044715) * x * x * x))
    if activation == "gelu":
        tail = normal_tail(np.abs(x))
        return flushed(x * np.where(x > 0, ONE - tail, tail))
    return x
