"""Kernels over weights and their scales."""

from fp8core.kernels.weights.allclose import ALL_CLOSE
from fp8core.kernels.weights.dequantize import DEQUANTIZE
from fp8core.kernels.weights.expand import EXPAND
from fp8core.kernels.weights.fnuz import NORMALIZE
from fp8core.kernels.weights.requantize import REQUANTIZE

__all__ = ["ALL_CLOSE", "DEQUANTIZE", "EXPAND", "NORMALIZE", "REQUANTIZE"]
