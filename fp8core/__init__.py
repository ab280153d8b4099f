"""FP8 inference arithmetic that belongs to no framework."""

from fp8core.errors import (
    BackendError,
    CheckpointError,
    DeviceError,
    DTypeError,
    Fp8Error,
    LayoutError,
    ScaleError,
    ShapeError,
    TuningError,
    UnsupportedProblemError,
)
from fp8core.interop.float8 import Float8Array
from fp8core.ops import (
    Capability,
    Quantized,
    all_close_1d,
    capabilities,
    convert_to_channelwise,
    dequantize,
    explain,
    normalize_e4m3fn_to_e4m3fnuz,
    normalize_e4m3fnuz_to_e4m3fn,
    per_tensor_dequantize,
    quantize,
    requantize_with_max_scale,
    rms_norm_quant,
    scaled_mm,
    scaled_mm_nt,
    silu_and_mul_quant,
)
from fp8core.ops.linear import Fp8Linear, linear
from fp8core.problem import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, GroupShape, Target
from fp8core.table import Explanation, Verdict
from fp8core.tuning import Tuning, tune

__version__ = "0.1.0"

__all__ = [
    "BLOCK_128",
    "GROUP_128",
    "PER_CHANNEL",
    "PER_TENSOR",
    "PER_TOKEN",
    "BackendError",
    "Capability",
    "CheckpointError",
    "DTypeError",
    "DeviceError",
    "Explanation",
    "Float8Array",
    "Fp8Error",
    "Fp8Linear",
    "GroupShape",
    "LayoutError",
    "Quantized",
    "ScaleError",
    "ShapeError",
    "Target",
    "Tuning",
    "TuningError",
    "UnsupportedProblemError",
    "Verdict",
    "all_close_1d",
    "capabilities",
    "convert_to_channelwise",
    "dequantize",
    "explain",
    "linear",
    "normalize_e4m3fn_to_e4m3fnuz",
    "normalize_e4m3fnuz_to_e4m3fn",
    "per_tensor_dequantize",
    "quantize",
    "requantize_with_max_scale",
    "rms_norm_quant",
    "scaled_mm",
    "scaled_mm_nt",
    "silu_and_mul_quant",
    "tune",
]
