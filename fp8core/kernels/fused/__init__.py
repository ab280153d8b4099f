"""Producers fused with the quantization of their results."""

from fp8core.kernels.fused.rms_norm import NORM_QUANTIZE, plan_norm_quantize
from fp8core.kernels.fused.silu import SILU_QUANTIZE, plan_silu_quantize

__all__ = ["NORM_QUANTIZE", "SILU_QUANTIZE", "plan_norm_quantize", "plan_silu_quantize"]
