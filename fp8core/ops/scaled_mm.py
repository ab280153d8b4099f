"""Scaled matrix products of FP8 matrices."""

from collections.abc import Sequence
from typing import Any, Final

from fp8core.core import specs
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.operation import Operation
from fp8core.core.product import RESULTS, product_of, transposed
from fp8core.core.specs import TensorSpec
from fp8core.interop import Operand, eager_only
from fp8core.kernels.gemm.simt import plan_clear_amax
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.quantized import Quantized, parts
from fp8core.problem import FORMATS, WIDE

OUT, AMAX = 5, 7
"""Places among the operands of a product."""


@eager_only
def scaled_mm(
    a: object,
    b: object,
    scale_a: object = None,
    scale_b: object = None,
    *,
    bias: object = None,
    out_dtype: object = "bfloat16",
    out_scale: object = None,
    amax: object = None,
    use_fast_accum: bool = True,
    batch_invariant: bool = False,
    out: object = None,
    stream: object = None,
) -> Any:
    """Return ``round(scale_a * (scale_b * (a @ b)) + bias)``: fp32 accumulation, one rounding.

    Args:
        a: FP8 ``[..., m, k]``, rows contiguous, or a `Quantized` per tensor, per token or by groups of 1x128.
        b: FP8 ``[k, n]``, columns contiguous: ``weight.T`` of a stored ``[n, k]``; or a `Quantized` (``q.T`` of a
            quantized weight) per tensor, per channel, by blocks of 128x128 or by groups of 1x128.
        scale_a: a number or fp32: one number, ``[..., m, 1]`` or ``[m]`` per token, or ``[..., m, ceil(k / 128)]`` for
            groups of 1x128.
        scale_b: a number or fp32: one number, ``[1, n]``, ``[n]`` or ``[n, 1]`` per channel, or, with groups of a,
            ``[ceil(k / 128), ceil(n / 128)]`` for blocks of 128x128 or ``[ceil(k / 128), n]`` for groups of 1x128.
        bias: ``[n]`` in out_dtype or fp32, added in fp32.
        out_dtype: bfloat16, float16, float32, or an FP8 format together with out_scale.
        out_scale: a number, or fp32 of one: codes are the clamped, rounded ``value * (1 / out_scale)``.
        amax: an fp32 array of one that receives the largest magnitude of the result before it is rounded.
        use_fast_accum: let the tensor cores accumulate with fewer bits (relative error 3e-3 against 2e-3).
        batch_invariant: give a row the same bits whatever m is.
        out: an array ``[..., m, n]`` of out_dtype for the result.
        stream: the stream to launch on; by default the one that the framework of a works on.

    Raises:
        ShapeError, DTypeError, LayoutError, ScaleError, DeviceError: before anything is launched or written.
        UnsupportedProblemError: no kernel can run it, as for e5m2 times e5m2.

    Example:
        >>> import numpy as np, fp8core
        >>> a = fp8core.quantize(np.ones((2, 32), np.float32))
        >>> weight = fp8core.quantize(np.full((3, 32), 0.5, np.float32))
        >>> fp8core.scaled_mm(a, weight.T, out_dtype="float32").round(3).tolist()
        [[16.0, 16.0, 16.0], [16.0, 16.0, 16.0]]
    """
    options: tuple[Any, ...] = (out_dtype, use_fast_accum, batch_invariant, None, None)
    if scale_a is None or scale_b is None or isinstance(a, Quantized) or isinstance(b, Quantized):
        a, scale_a, group_a = parts(a, scale_a, "a", "scale_a")
        b, scale_b, group_b = parts(b, scale_b, "b", "scale_b")
        options = (*options[:3], group_a, None if group_b is None else (group_b.cols, group_b.rows))
    return _SCALED_MM((a, b, scale_a, scale_b, bias, out, out_scale, amax), options, stream)[0][OUT]


@eager_only
def scaled_mm_nt(
    a: object,
    weight: object,
    scale_a: object = None,
    scale_b: object = None,
    *,
    bias: object = None,
    out_dtype: object = "bfloat16",
    out_scale: object = None,
    amax: object = None,
    use_fast_accum: bool = True,
    batch_invariant: bool = False,
    out: object = None,
    stream: object = None,
) -> Any:
    """Return `scaled_mm` of a and a weight as it is stored, ``[n, k]``.

    ``scale_b`` has the weight's orientation: ``[n, 1]`` or ``[n]`` per channel, ``[ceil(n / 128), ceil(k / 128)]`` for
    blocks, ``[n, ceil(k / 128)]`` for groups. All else is as for `scaled_mm`.

    Example:
        >>> import numpy as np, fp8core
        >>> a = fp8core.quantize(np.ones((2, 32), np.float32))
        >>> weight = fp8core.quantize(np.full((3, 32), 0.5, np.float32))
        >>> fp8core.scaled_mm_nt(a, weight, out_dtype="float32").shape
        (2, 3)
    """
    options: tuple[Any, ...] = (out_dtype, use_fast_accum, batch_invariant, None, None)
    if scale_a is None or scale_b is None or isinstance(a, Quantized) or isinstance(weight, Quantized):
        a, scale_a, group_a = parts(a, scale_a, "a", "scale_a")
        weight, scale_b, group_b = parts(weight, scale_b, "weight", "scale_b")
        options = (*options[:3], group_a, group_b)
    return _SCALED_MM_NT((a, weight, scale_a, scale_b, bias, out, out_scale, amax), options, stream)[0][OUT]


def _describe(operands: Sequence[TensorSpec | None], options: tuple[Any, ...], *, stored: bool) -> Described:
    a, b, scale_a, scale_b, bias, out, out_scale, amax = operands
    out_dtype, use_fast_accum, batch_invariant, group_a, group_b = options
    use_fast_accum = specs.flag(use_fast_accum, "use_fast_accum")
    batch_invariant = specs.flag(batch_invariant, "batch_invariant")
    a, b = specs.required(a, "a"), specs.required(b, "weight" if stored else "b")
    scale_a, scale_b = specs.required(scale_a, "scale_a"), specs.required(scale_b, "scale_b")
    weight = b if stored else transposed(b)
    product = product_of(
        a, weight, scale_a, scale_b, bias, out_dtype, out_scale, amax, stored=stored, group_a=group_a, group_b=group_b
    )
    problem = product.problem(use_fast_accum, batch_invariant, out)
    results = {OUT: NewArray(product.shape, product.out)}
    if amax is not None:
        results[AMAX] = NewArray((1,), "float32")

    def plan() -> Planned:
        if product.m and product.n:
            launch = SCALED_MM.plan(problem)
            return Planned(launch, launch.scratch_bytes)
        if amax is None:
            return Planned(None)
        clear = plan_clear_amax(product.a.target)
        return Planned(lambda stream_, *addresses: clear(stream_, addresses[AMAX]))

    return Described(results, plan, lambda: SCALED_MM.explain(problem))


_OPERANDS: Final = (
    Operand("a", *FORMATS),
    Operand("b", *FORMATS),
    Operand("scale_a", "float32"),
    Operand("scale_b", "float32"),
    Operand("bias", *WIDE),
    Operand("out", *RESULTS),
    Operand("out_scale", "float32"),
    Operand("amax", "float32"),
)
_SCALED_MM: Final = Operation(
    _OPERANDS, lambda operands, options: _describe(operands, options, stored=False), scratch=True, numbers=(2, 3, 6)
)
_SCALED_MM_NT: Final = Operation(
    (_OPERANDS[0], Operand("weight", *FORMATS), *_OPERANDS[2:]),
    lambda operands, options: _describe(operands, options, stored=True),
    scratch=True,
    numbers=(2, 3, 6),
)
"""Operands in the order of a product's launch."""
