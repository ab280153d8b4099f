"""Fused producers: what comes before a linear layer, and its quantization, in one launch."""

from functools import partial
from types import SimpleNamespace
from typing import Final

from fp8core import interop
from fp8core.core import operands, signature
from fp8core.core.calls import Calls
from fp8core.core.scaling import EPS, Quantized, Ready, Scaling, destination, only_scale, scaling
from fp8core.errors import ShapeError
from fp8core.interop import TensorView
from fp8core.kernels.fused import NORM_QUANTIZE, SILU_QUANTIZE
from fp8core.problem import PER_TOKEN, NormQuantize, ScaleFormat, ScaleLayout, SiluQuantize

_NORMS: Final[Calls[Ready]] = Calls()
"""Their launches want the addresses of weight and residual, then what those of a quantization want."""
_SILUS: Final[Calls[Ready]] = Calls()


class _Norm:
    """The checked operands of `rms_norm_quant`."""

    def __init__(self, x: object, weight: object, residual: object) -> None:
        self.x = interop.view(x, "x")
        operands.is_wide(self.x, "x")
        self.at = operands.matrix(self.x, "x")
        self.weight = interop.view(weight, "weight")
        operands.is_wide(self.weight, "weight")
        if self.weight.shape != (self.at.cols,) or (self.at.cols > 1 and self.weight.strides != (1,)):
            raise ShapeError(
                f"weight needs {self.at.cols} contiguous elements, got shape {self.weight.shape} "
                f"with strides {self.weight.strides}"
            )
        operands.same_device(self.x, "x", weight=self.weight)
        self.residual: TensorView | None = None
        self.residual_pointer, self.residual_stride = 0, 0
        if residual is not None:
            self.residual = interop.view(residual, "residual", written=True)
            operands.same_device(self.x, "x", residual=self.residual)
            self.residual_pointer = self.residual.pointer
            self.residual_stride = operands.written(self.residual, "residual", self.x.shape, self.x.dtype).stride

    @property
    def others(self) -> tuple[TensorView, ...]:
        """The operands beside x."""
        return (self.weight,) if self.residual is None else (self.weight, self.residual)

    def problem(self, how: Scaling, round_intermediate: bool, data_pointer: int, data_stride: int) -> NormQuantize:
        """Return the problem; it is asked of the table as it is."""
        size = operands.itemsize(self.x)
        bits = operands.alignment(
            self.x.pointer,
            self.at.stride * size,
            self.residual_pointer,
            self.residual_stride * size,
            self.weight.pointer * size // operands.itemsize(self.weight),
            data_pointer * size,
            data_stride * size,
        )
        return NormQuantize(
            self.x.target,
            self.x.dtype,
            self.weight.dtype,
            how.dtype,
            how.group_shape,
            how.given is not None,
            how.scale_format,
            how.layout,
            self.residual is not None,
            round_intermediate,
            self.at.cols,
            bits,
        )


def rms_norm_quant(
    x: object,
    weight: object,
    epsilon: float,
    *,
    residual: object = None,
    dtype: object = "float8_e4m3fn",
    group_shape: tuple[int, int] = PER_TOKEN,
    scale: object = None,
    scale_ub: object = None,
    scale_format: ScaleFormat = "float32",
    scale_layout: ScaleLayout = "k",
    eps: float = EPS,
    round_intermediate: bool = False,
    out: object = None,
    stream: object = None,
) -> Quantized:
    """Return ``quantize(x / sqrt(mean(x**2) + epsilon) * weight)`` in one launch.

    The norm is formed in fp32 and not rounded to x's dtype before it is quantized.

    Args:
        x: float32, float16 or bfloat16 ``[..., cols]``.
        weight: one number a column, contiguous.
        epsilon: what is added to the mean square.
        residual: like x; ``x + residual`` is normed instead, and written to residual in its dtype.
        dtype: the FP8 format of the result.
        group_shape: per token, ``(1, g)``, or per tensor with a given scale.
        scale: a given scale, as for `quantize`.
        scale_ub: an upper bound of amax, per token.
        scale_format: as for `quantize`.
        scale_layout: as for `quantize`.
        eps: the least amax of a group.
        round_intermediate: round the norm to x's dtype first, as vLLM's static kernels do.
        out: an FP8 array for the data, or a pair of arrays for data and scale.
        stream: the stream to launch on.
    """
    data, out_scale = out if isinstance(out, tuple) else (out, None)
    kept = out_scale if scale is None else only_scale(scale, out_scale)
    if residual is None:
        (x_at, weight_at, data_at, scale_at), looks = signature.looks(x, weight, data, kept)
        residual_at = 0
    else:
        (x_at, weight_at, residual_at, data_at, scale_at), looks = signature.looks(x, weight, residual, data, kept)
    key = None
    if looks is not None and (scale_ub is None or isinstance(scale_ub, float)):
        bits = (x_at | residual_at | data_at) & 15 | (weight_at & 31) << 4
        options = (dtype, group_shape, scale_ub, scale_format, scale_layout, eps, round_intermediate)
        key = (looks, scale is None, bits, float(epsilon), *options)
    call = _NORMS.get(key) if stream is None else None
    if call is not None:
        run = None if call.launch is None else partial(call.launch, weight_at, residual_at)
        return call.to.filled(run, call.stream(), None, x_at, data, data_at, kept, scale_at, 0)
    operand = _Norm(x, weight, residual)
    view, at = operand.x, operand.at
    how = scaling(dtype, group_shape, scale, scale_ub, scale_format, scale_layout, eps, view, at.rows, at.cols)
    to = destination(view, how, view.shape, at.rows, at.cols, data, kept)
    plan = NORM_QUANTIZE.plan(operand.problem(how, round_intermediate, to.data_at, to.data_stride))
    residual_stride, upper_value = operand.residual_stride, how.upper_value  # a kept launch keeps no operand

    def launched(
        weight_at: int, residual_at: int, work: int, x_at: int, data_at: int, scale_at: int, upper_at: int
    ) -> None:
        inputs = (x_at, at.stride, residual_at, residual_stride, weight_at, float(epsilon))
        written = (data_at, to.data_stride, scale_at, *to.scale_strides)
        plan(work, *inputs, *written, at.rows, upper_at, upper_value, eps)

    launch = launched if at.rows * at.cols or how.computed(at.rows, at.cols) else None
    _NORMS.keep(key, Ready(view.framework.asking_stream(view.target), launch, to))
    work = interop.stream_of(view, stream, *operand.others, *how.others)
    run = None if launch is None else partial(launch, operand.weight.pointer, operand.residual_pointer)
    pool = None if stream is None else work
    return to.filled(run, work, pool, view.pointer, data, to.data_at, kept, to.scale_at, how.upper_pointer)


def problem_of_rms_norm_quant(call: SimpleNamespace) -> NormQuantize:
    """Return the problem that `rms_norm_quant` with the arguments ``call`` poses."""
    operand = _Norm(call.x, call.weight, call.residual)
    how = _scaling_of(call, operand.x, operand.at.rows, operand.at.cols)
    return operand.problem(how, call.round_intermediate, 0, operand.at.cols)


def _scaling_of(call: SimpleNamespace, x: TensorView, rows: int, cols: int) -> Scaling:
    return scaling(
        call.dtype,
        call.group_shape,
        call.scale,
        call.scale_ub,
        call.scale_format,
        call.scale_layout,
        call.eps,
        x,
        rows,
        cols,
    )


def _gate_and_up(x: object) -> tuple[TensorView, operands.Matrix, int]:
    view = interop.view(x, "x")
    operands.is_wide(view, "x")
    at = operands.matrix(view, "x")
    if at.cols % 2:
        raise ShapeError(f"x needs gate and up of equal length side by side, got {at.cols} columns")
    return view, at, at.cols // 2


def _silu_problem(
    view: TensorView, at: operands.Matrix, how: Scaling, round_intermediate: bool, data_pointer: int, data_stride: int
) -> SiluQuantize:
    size, cols = operands.itemsize(view), at.cols // 2
    bits = operands.alignment(view.pointer, at.stride * size, cols * size, data_pointer * size, data_stride * size)
    return SiluQuantize(
        view.target,
        view.dtype,
        how.dtype,
        how.group_shape,
        how.given is not None,
        how.scale_format,
        how.layout,
        round_intermediate,
        cols,
        bits,
    )


def silu_and_mul_quant(
    x: object,
    *,
    dtype: object = "float8_e4m3fn",
    group_shape: tuple[int, int] = PER_TOKEN,
    scale: object = None,
    scale_ub: object = None,
    scale_format: ScaleFormat = "float32",
    scale_layout: ScaleLayout = "k",
    eps: float = EPS,
    round_intermediate: bool = False,
    out: object = None,
    stream: object = None,
) -> Quantized:
    """Return ``quantize(silu(gate) * up)`` of ``x = [gate, up]`` (``[..., 2n]``) in one launch.

    ``silu(v) = v / (1 + exp(-v))``; the product is formed in fp32 and not rounded to x's dtype before it is
    quantized, unless ``round_intermediate`` asks for it. All other arguments are those of `quantize`.
    """
    data, out_scale = out if isinstance(out, tuple) else (out, None)
    kept = out_scale if scale is None else only_scale(scale, out_scale)
    (x_at, data_at, scale_at), looks = signature.looks(x, data, kept)
    key = None
    if looks is not None and (scale_ub is None or isinstance(scale_ub, float)):
        options = (dtype, group_shape, scale_ub, scale_format, scale_layout, eps, round_intermediate)
        key = (looks, scale is None, (x_at | data_at) & 15, *options)
    call = _SILUS.get(key) if stream is None else None
    if call is not None:
        return call.to.filled(call.launch, call.stream(), None, x_at, data, data_at, kept, scale_at, 0)
    view, at, cols = _gate_and_up(x)
    how = scaling(dtype, group_shape, scale, scale_ub, scale_format, scale_layout, eps, view, at.rows, cols)
    to = destination(view, how, (*view.shape[:-1], cols), at.rows, cols, data, kept)
    plan = SILU_QUANTIZE.plan(_silu_problem(view, at, how, round_intermediate, to.data_at, to.data_stride))
    upper_value = how.upper_value  # a kept launch keeps no operand

    def launched(work: int, x_at: int, data_at: int, scale_at: int, upper_at: int) -> None:
        written = (data_at, to.data_stride, scale_at, *to.scale_strides)
        plan(work, x_at, at.stride, *written, at.rows, upper_at, upper_value, eps)

    launch = launched if at.rows * cols or how.computed(at.rows, cols) else None
    _SILUS.keep(key, Ready(view.framework.asking_stream(view.target), launch, to))
    work = interop.stream_of(view, stream, *how.others)
    pool = None if stream is None else work
    return to.filled(launch, work, pool, view.pointer, data, to.data_at, kept, to.scale_at, how.upper_pointer)


def problem_of_silu_and_mul_quant(call: SimpleNamespace) -> SiluQuantize:
    """Return the problem that `silu_and_mul_quant` with the arguments ``call`` poses."""
    view, at, cols = _gate_and_up(call.x)
    how = _scaling_of(call, view, at.rows, cols)
    return _silu_problem(view, at, how, call.round_intermediate, 0, cols)
