"""Quantization: FP8 data and scales."""

from fp8core.kernels.quantize.table import QUANTIZE

__all__ = ["QUANTIZE"]
