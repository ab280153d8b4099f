"""vLLM's ``Fp8LinearOp``: a linear layer whose arrays are arguments of each call."""

from typing import Any

from fp8core import interop
from fp8core.core import checks
from fp8core.dtypes import FORMATS
from fp8core.errors import ScaleError
from fp8core.ops.linear import input_format
from fp8core.ops.quantize import quantize_by
from fp8core.ops.scaled_mm import product_by
from fp8core.problem import PER_TENSOR, PER_TOKEN
from fp8core.types import Array, Scale, WideDType
from fp8core.w8a8.operations import (
    ANY_INPUT,
    APPLY,
    INPUT_UPPER,
    PER_TOKEN_IF_DYNAMIC,
    QUANTIZE_INPUT,
    WEIGHT,
    fp8_of,
    upper_bound,
)


class Fp8LinearOp:
    """An FP8 linear layer for a weight ``[k, n]``: quantizes its input, unless that is FP8 already, and multiplies.

    Examples:
        >>> import numpy as np, fp8core
        >>> from fp8core import w8a8
        >>> weight = fp8core.quantize(np.ones((3, 32), np.float32))
        >>> op = w8a8.Fp8LinearOp(use_per_token_if_dynamic=True)
        >>> op.apply(np.ones((2, 32), np.float32), weight.data.T, weight.scale).round(3).tolist()
        [[32.0, 32.0, 32.0], [32.0, 32.0, 32.0]]
    """

    def __init__(
        self,
        cutlass_fp8_supported: bool | None = None,
        use_per_token_if_dynamic: bool = False,
        pad_output: bool | None = None,
    ) -> None:
        """Take vLLM's arguments, those of 0.9: a later version's ``GroupShape`` is no flag and is refused.

        Args:
            cutlass_fp8_supported: accepted and stored, but unused; the table chooses the kernel.
            use_per_token_if_dynamic: with a dynamic scale, use one per token.
            pad_output: accepted, but unused; no kernel here needs padding.

        Raises:
            DTypeError: use_per_token_if_dynamic or pad_output is neither True nor False.
        """
        self.cutlass_fp8_supported = cutlass_fp8_supported
        self.use_per_token_if_dynamic = checks.flag(use_per_token_if_dynamic, PER_TOKEN_IF_DYNAMIC)
        self.output_padding = 17 if pad_output is not None and checks.flag(pad_output, "pad_output") else None

    @interop.eager_only
    def apply(
        self,
        input: Array,
        weight: Array,
        weight_scale: Scale,
        out_dtype: WideDType | None = None,
        input_scale: Scale | None = None,
        input_scale_ub: Scale | None = None,
        bias: Array | None = None,
        use_per_token_if_dynamic: bool | None = None,
    ) -> Any:
        """Return ``input @ weight + bias`` for an input with any leading axes.

        Args:
            input: float32, float16 or bfloat16 ``[..., k]``, or FP8 together with input_scale.
            weight: FP8 ``[k, n]``, columns contiguous. The input gets its format, or E4M3 if that is E5M2.
            weight_scale: a number, or float32 of one or of ``[n, 1]``.
            out_dtype: the result's dtype; None means the input's dtype, or bfloat16 if the input is FP8.
            input_scale: a given scale of the input.
            input_scale_ub: an upper bound of amax, ignored unless the scale is dynamic and per token.
            bias: ``[n]`` in the result's dtype or float32.
            use_per_token_if_dynamic: overrides the setting of the layer.

        Returns:
            ``[..., n]`` of the result's dtype, in the framework of the input.

        Raises:
            ShapeError, DTypeError, LayoutError, ScaleError, DeviceError, UnsupportedProblemError: as for
                `fp8core.linear`.
        """
        own, _ = interop.declared(input, ANY_INPUT)
        given = self.use_per_token_if_dynamic if use_per_token_if_dynamic is None else use_per_token_if_dynamic
        per_token = checks.flag(given, PER_TOKEN_IF_DYNAMIC)
        data: Any = input
        scale: Any = input_scale
        dtype: Any = out_dtype
        if own not in FORMATS:
            data, scale = quantize_by(
                QUANTIZE_INPUT,
                input,
                input_format(fp8_of(weight, WEIGHT)),
                PER_TOKEN if per_token and input_scale is None else PER_TENSOR,
                scale=input_scale,
                scale_ub=upper_bound(input_scale_ub, INPUT_UPPER, used=per_token and input_scale is None),
            )
            dtype = own if out_dtype is None else out_dtype
        elif input_scale is None:
            raise ScaleError(f"input of {own} needs input_scale, got None")
        return product_by(APPLY, data, weight, scale, weight_scale, bias, "bfloat16" if dtype is None else dtype)
