"""Quantization: FP8 data and scales."""

from fp8core.kernels.quantize.prepare import mode
from fp8core.kernels.quantize.table import QUANTIZE, bind

__all__ = ["QUANTIZE", "bind", "mode"]
