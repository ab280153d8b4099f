"""The names that users of vLLM's ``w8a8_utils`` and ``scaled_fp8_quant`` know, over fp8core's operations.

No kernels and no logic of its own: every function is a way into `fp8core.quantize`, `fp8core.scaled_mm` and their
neighbours, and takes and gives arrays of any framework. Weights are ``[k, n]`` with contiguous columns, as these
names' users pass them. A scale of one number may be a Python or NumPy number.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fp8core import interop
from fp8core.core import specs
from fp8core.ops import (
    all_close_1d,
    capabilities,
    convert_to_channelwise,
    normalize_e4m3fn_to_e4m3fnuz,
    per_tensor_dequantize,
    quantize,
    requantize_with_max_scale,
    scaled_mm,
)
from fp8core.problem import FORMATS, PER_TENSOR, PER_TOKEN, WIDE, native_e4m3

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
"""Kept for importers: no product here needs a tensor of ones."""
USE_ROWWISE_TORCH_SCALED_MM = False
"""Kept for importers: no product here goes through torch."""

CUTLASS_FP8_SUPPORTED: bool
CUTLASS_BLOCK_FP8_SUPPORTED: bool


def cutlass_fp8_supported() -> bool:
    """Return whether per-tensor and per-token FP8 products run on a fused kernel on the current device."""
    able = capabilities()
    return able["scaled_mm_per_tensor"].able and able["scaled_mm_per_token"].able


def cutlass_block_fp8_supported() -> bool:
    """Return whether block-scaled FP8 products run on a fused kernel on the current device."""
    return capabilities()["scaled_mm_block"].able


def cutlass_group_gemm_supported() -> bool:
    """Return whether a grouped FP8 product exists here."""
    return capabilities()["grouped_mm"].able


def sparse_cutlass_supported() -> bool:
    """Return whether a 2:4 sparse FP8 product exists here."""
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
    """Do nothing: kept for importers."""


@interop.eager_only
def scaled_fp8_quant(
    input: Any,
    scale: Any = None,
    num_token_padding: int | None = None,
    scale_ub: Any = None,
    use_per_token_if_dynamic: bool = False,
    output: Any = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Any, Any]:
    """Return ``(data, scale)`` of a matrix ``[m, k]``: `fp8core.quantize` under the names vLLM's users know.

    Args:
        input: float32, float16 or bfloat16 ``[m, k]``.
        scale: a given scale, a number or an fp32 array; without it the scale is dynamic.
        num_token_padding: give at least so many rows.
        scale_ub: an upper bound of amax, per token only; per tensor it has no meaning and is left aside.
        use_per_token_if_dynamic: one scale a token instead of one for the tensor, when the scale is dynamic.
        output: an FP8 array for the data; otherwise it is of the device's own E4M3.
        group_shape: groups of a given scale that has more than one number.
    """
    dynamic = PER_TOKEN if use_per_token_if_dynamic else PER_TENSOR
    shape = group_shape if group_shape is not None else (dynamic if scale is None else PER_TOKEN)
    return quantize(
        input,
        dtype=fp8_of(output, "output")
        if output is not None
        else native_e4m3(interop.view(input, interop.Operand("input", *WIDE)).target),
        group_shape=shape,
        scale=scale,
        scale_ub=scale_ub if scale is None and shape == PER_TOKEN else None,
        rows_padded=num_token_padding,
        out=output,
    )


def _product(
    qinput: Any, weight: Any, out_dtype: Any, scale_a: Any, scale_b: Any, bias: Any, output_shape: Sequence[int]
) -> Any:
    rows = math.prod(output_shape[:-1])
    result = scaled_mm(qinput[:rows], weight, _rows_of(scale_a, rows), scale_b, bias=bias, out_dtype=out_dtype)
    return result.reshape(tuple(output_shape))


def _rows_of(scale: Any, rows: int) -> Any:
    """Return the scales of the first ``rows`` tokens: padding rows leave with their scales."""
    shape = tuple(getattr(scale, "shape", ()))  # a number has none
    return scale[:rows] if len(shape) > 0 and shape[0] > rows and shape not in ((1,), (1, 1)) else scale


@interop.eager_only
def cutlass_w8a8_scaled_mm(
    *,
    qinput: Any,
    weight: Any,
    out_dtype: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any,
    output_shape: Sequence[int],
    input_2d: Any = None,
) -> Any:
    """Return `fp8core.scaled_mm` shaped as ``output_shape``, for any mix of scales per tensor and per row.

    Args:
        qinput: FP8 ``[rows, k]``; rows beyond those of output_shape are padding and leave no trace.
        weight: FP8 ``[k, n]``, columns contiguous.
        out_dtype: the result's dtype.
        scale_a: the input's scale.
        scale_b: the weight's scale.
        bias: ``[n]`` or None.
        output_shape: the result's shape, ``[..., n]``.
        input_2d: the unquantized input; not needed.
    """
    return _product(qinput, weight, out_dtype, scale_a, scale_b, bias, output_shape)


@interop.eager_only
def rocm_per_tensor_w8a8_scaled_mm(
    *,
    qinput: Any,
    weight: Any,
    out_dtype: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any,
    input_2d: Any,
    output_shape: Sequence[int],
) -> Any:
    """Return what `cutlass_w8a8_scaled_mm` returns: the table chooses the kernel."""
    return _product(qinput, weight, out_dtype, scale_a, scale_b, bias, output_shape)


torch_per_tensor_w8a8_scaled_mm = rocm_per_tensor_w8a8_scaled_mm
torch_per_token_w8a8_scaled_mm = rocm_per_tensor_w8a8_scaled_mm
torch_channelwise_w8a8_scaled_mm = rocm_per_tensor_w8a8_scaled_mm


def dispatch_w8a8_scaled_mm(
    cutlass_fp8_supported: bool,
    per_tensor_weights: bool,
    per_tensor_activations: bool,
    use_per_token_if_dynamic: bool | None = None,
) -> Callable[..., Any]:
    """Return the named product for a kind of scales; each leads into the same table, so all give the same numbers."""
    if cutlass_fp8_supported:
        return cutlass_w8a8_scaled_mm
    if per_tensor_weights and per_tensor_activations:
        return torch_per_tensor_w8a8_scaled_mm
    if not per_tensor_weights and not per_tensor_activations and use_per_token_if_dynamic:
        return torch_per_token_w8a8_scaled_mm
    return torch_channelwise_w8a8_scaled_mm


def fp8_of(x: Any, name: str) -> str:
    """Return the dtype of an array that has to be FP8."""
    found = specs.spec_of(interop.view(x, interop.Operand(name, *FORMATS)), name)
    specs.is_fp8(found)
    return found.dtype


class Fp8LinearOp:
    """An FP8 linear layer over a weight ``[k, n]``: quantizes its input, unless it is FP8, and multiplies."""

    def __init__(
        self,
        cutlass_fp8_supported: bool | None = None,
        use_per_token_if_dynamic: bool = False,
        pad_output: bool | None = None,
    ) -> None:
        """Take vLLM's arguments.

        Args:
            cutlass_fp8_supported: kept for callers; the table chooses the kernel.
            use_per_token_if_dynamic: one scale a token where the scale is dynamic.
            pad_output: kept for callers; nothing here needs padding.
        """
        self.cutlass_fp8_supported = cutlass_fp8_supported
        self.use_per_token_if_dynamic = use_per_token_if_dynamic
        self.output_padding = None if not pad_output else 17

    @interop.eager_only
    def apply(
        self,
        input: Any,
        weight: Any,
        weight_scale: Any,
        out_dtype: Any = None,
        input_scale: Any = None,
        input_scale_ub: Any = None,
        bias: Any = None,
        use_per_token_if_dynamic: bool | None = None,
    ) -> Any:
        """Return ``input @ weight + bias`` for an input of any leading axes.

        Args:
            input: float32, float16 or bfloat16 ``[..., k]``, or FP8 together with input_scale.
            weight: FP8 ``[k, n]``, columns contiguous.
            weight_scale: one number, or one a channel.
            out_dtype: the result's dtype; None is the input's own, bfloat16 where that is FP8.
            input_scale: a given scale of the input.
            input_scale_ub: an upper bound of amax per token.
            bias: ``[n]``.
            use_per_token_if_dynamic: overrides the layer's own.
        """
        view = interop.view(input, interop.Operand("input", *WIDE, *FORMATS))
        per_token = self.use_per_token_if_dynamic if use_per_token_if_dynamic is None else use_per_token_if_dynamic
        data, scale, dtype = input, input_scale, out_dtype
        if view.dtype not in FORMATS:
            data, scale = quantize(
                input,
                dtype=fp8_of(weight, "weight"),
                group_shape=PER_TOKEN if per_token and input_scale is None else PER_TENSOR,
                scale=input_scale,
                scale_ub=input_scale_ub if per_token and input_scale is None else None,
            )
            dtype = view.dtype if out_dtype is None else out_dtype
        return scaled_mm(data, weight, scale, weight_scale, bias=bias, out_dtype="bfloat16" if dtype is None else dtype)
