"""The public operations: a signature, a docstring, and how each describes its calls (`fp8core.core.operation`)."""

from fp8core.ops.all_close import all_close_1d
from fp8core.ops.dequantize import dequantize, per_tensor_dequantize
from fp8core.ops.explain import Capability, capabilities, explain
from fp8core.ops.fnuz import normalize_e4m3fn_to_e4m3fnuz, normalize_e4m3fnuz_to_e4m3fn
from fp8core.ops.grouped_mm import grouped_scaled_mm_nt
from fp8core.ops.layer import Fp8Linear
from fp8core.ops.linear import linear
from fp8core.ops.moe_permute import Permuted, moe_permute
from fp8core.ops.moe_unpermute import moe_unpermute
from fp8core.ops.producers import rms_norm_quant, silu_and_mul_quant
from fp8core.ops.quantize import quantize
from fp8core.ops.quantized import Quantized
from fp8core.ops.scaled_mm import scaled_mm, scaled_mm_nt
from fp8core.ops.shards import convert_to_channelwise, requantize_with_max_scale

__all__ = [
    "Capability",
    "Fp8Linear",
    "Permuted",
    "Quantized",
    "all_close_1d",
    "capabilities",
    "convert_to_channelwise",
    "dequantize",
    "explain",
    "grouped_scaled_mm_nt",
    "linear",
    "moe_permute",
    "moe_unpermute",
    "normalize_e4m3fn_to_e4m3fnuz",
    "normalize_e4m3fnuz_to_e4m3fn",
    "per_tensor_dequantize",
    "quantize",
    "requantize_with_max_scale",
    "rms_norm_quant",
    "scaled_mm",
    "scaled_mm_nt",
    "silu_and_mul_quant",
]
