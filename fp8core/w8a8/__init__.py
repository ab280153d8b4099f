"""The functions of vLLM's ``w8a8_utils``, and ``scaled_fp8_quant``, with their names, over fp8core's operations.

The module has no kernels and no logic of its own: every function calls `fp8core.quantize`, `fp8core.scaled_mm` or
another operation, and takes and returns arrays of any framework. Weights are ``[k, n]`` with contiguous columns, as
vLLM passes them. A scale of one number may be a Python or NumPy number. Formulas, dtypes and errors are those of
`fp8core.quantize` and `fp8core.scaled_mm`; error messages use the operand names of these functions.

Names and signatures are those of ``vllm/model_executor/layers/quantization/utils/w8a8_utils.py`` of vLLM 0.9 and of
``vllm/_custom_ops.py`` (``scaled_fp8_quant``).
"""

from functools import cache

from fp8core.ops import (
    all_close_1d,
    capabilities,
    convert_to_channelwise,
    normalize_e4m3fn_to_e4m3fnuz,
    per_tensor_dequantize,
    requantize_with_max_scale,
)
from fp8core.w8a8.layer import Fp8LinearOp
from fp8core.w8a8.products import (
    cutlass_w8a8_scaled_mm,
    dispatch_w8a8_scaled_mm,
    rocm_per_tensor_w8a8_scaled_mm,
    torch_channelwise_w8a8_scaled_mm,
    torch_per_tensor_w8a8_scaled_mm,
    torch_per_token_w8a8_scaled_mm,
)
from fp8core.w8a8.quantization import scaled_fp8_quant

__all__ = [
    "CUTLASS_BLOCK_FP8_SUPPORTED",
    "CUTLASS_FP8_SUPPORTED",
    "TORCH_DEVICE_IDENTITY",
    "USE_ROWWISE_TORCH_SCALED_MM",
    "Fp8LinearOp",
    "all_close_1d",
    "convert_to_channelwise",
    "cutlass_block_fp8_supported",
    "cutlass_fp8_supported",
    "cutlass_group_gemm_supported",
    "cutlass_w8a8_scaled_mm",
    "dispatch_w8a8_scaled_mm",
    "maybe_create_device_identity",
    "normalize_e4m3fn_to_e4m3fnuz",
    "per_tensor_dequantize",
    "requantize_with_max_scale",
    "rocm_per_tensor_w8a8_scaled_mm",
    "scaled_fp8_quant",
    "sparse_cutlass_supported",
    "torch_channelwise_w8a8_scaled_mm",
    "torch_per_tensor_w8a8_scaled_mm",
    "torch_per_token_w8a8_scaled_mm",
]

TORCH_DEVICE_IDENTITY = None
"""Kept for code that imports it: no product here needs a tensor of ones."""
USE_ROWWISE_TORCH_SCALED_MM = False
"""Kept for code that imports it: no product here calls torch."""

CUTLASS_FP8_SUPPORTED: bool
"""The result of `cutlass_fp8_supported` at the first access."""
CUTLASS_BLOCK_FP8_SUPPORTED: bool
"""The result of `cutlass_block_fp8_supported` at the first access."""


def cutlass_fp8_supported() -> bool:
    """Return whether per-tensor and per-token FP8 products run on a fused kernel on the current device.

    Examples:
        >>> from fp8core import w8a8
        >>> w8a8.cutlass_fp8_supported() in (True, False)
        True
    """
    able = capabilities()
    return able["scaled_mm_per_tensor"].able and able["scaled_mm_per_token"].able


def cutlass_block_fp8_supported() -> bool:
    """Return whether block-scaled FP8 products run on a fused kernel on the current device.

    Examples:
        >>> from fp8core import w8a8
        >>> w8a8.cutlass_block_fp8_supported() in (True, False)
        True
    """
    return capabilities()["scaled_mm_block"].able


def cutlass_group_gemm_supported() -> bool:
    """Return whether the current device has a kernel made for grouped products: Hopper and the host do.

    `fp8core.grouped_scaled_mm_nt` also runs on every other GPU.

    Examples:
        >>> from fp8core import w8a8
        >>> w8a8.cutlass_group_gemm_supported()
        True
    """
    return capabilities()["grouped_mm"].able


def sparse_cutlass_supported() -> bool:
    """Return whether fp8core has a 2:4 sparse FP8 product.

    Examples:
        >>> from fp8core import w8a8
        >>> w8a8.sparse_cutlass_supported()
        False
    """
    return capabilities()["sparse_mm"].able


@cache
def _computed(name: str) -> bool:
    return {
        "CUTLASS_FP8_SUPPORTED": cutlass_fp8_supported,
        "CUTLASS_BLOCK_FP8_SUPPORTED": cutlass_block_fp8_supported,
    }[name]()


def __getattr__(name: str) -> bool:
    if name in ("CUTLASS_FP8_SUPPORTED", "CUTLASS_BLOCK_FP8_SUPPORTED"):
        return _computed(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def maybe_create_device_identity() -> None:
    """Do nothing: kept for code that calls it.

    Examples:
        >>> from fp8core import w8a8
        >>> w8a8.maybe_create_device_identity()
    """
