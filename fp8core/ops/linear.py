"""FP8 linear layers: `linear` quantizes and multiplies, `Fp8Linear` is its prepared form."""

from types import SimpleNamespace
from typing import Any

from fp8core import interop
from fp8core.core import operands, signature
from fp8core.core.calls import Calls
from fp8core.ops.explain import explains
from fp8core.ops.layer import Call, Layer, explanation, forward
from fp8core.ops.quantize import quantize
from fp8core.problem import PER_CHANNEL, PER_TOKEN, GroupShape
from fp8core.runtime import device
from fp8core.table import Explanation

_CALLS: Calls[Call] = Calls()


def linear(
    x: object,
    weight: object,
    weight_scale: object,
    *,
    bias: object = None,
    input_scale: object = None,
    group_shape: tuple[int, int] = PER_TOKEN,
    scale_ub: object = None,
    out_dtype: object = None,
    use_fast_accum: bool = True,
    batch_invariant: bool = False,
    out: object = None,
    stream: object = None,
) -> Any:
    """Return ``x @ weight.T + bias`` with x quantized to FP8, unless it is FP8 already.

    Args:
        x: float32, float16 or bfloat16 ``[..., k]``, or FP8 together with input_scale.
        weight: FP8 ``[n, k]`` as it is stored, rows contiguous.
        weight_scale: fp32 in the weight's orientation: one number, ``[n, 1]`` or ``[n]`` per channel, or
            ``[ceil(n / 128), ceil(k / 128)]`` for 128x128 blocks, which need group_shape (1, 128).
        bias: ``[n]`` in out_dtype or fp32.
        input_scale: the scale of x: given for static quantization, and always for an x of FP8.
        group_shape: how x is quantized: PER_TOKEN, PER_TENSOR or GROUP_128.
        scale_ub: an upper bound of amax per token.
        out_dtype: the result's dtype; None is x's own, bfloat16 where x is FP8.
        use_fast_accum: as for `scaled_mm`.
        batch_invariant: as for `scaled_mm`.
        out: an array ``[..., n]`` for the result.
        stream: the stream to launch on.

    Raises:
        ShapeError, DTypeError, LayoutError, ScaleError, DeviceError: before anything is launched or written.
    """
    layer = Layer(
        weight,
        weight_scale,
        bias,
        input_scale,
        group_shape,
        scale_ub,
        out_dtype,
        use_fast_accum,
        batch_invariant,
        False,
    )
    addresses, looks = signature.looks(x, weight, weight_scale, bias, input_scale, out)
    x_at, weight_at, weight_scale_at, bias_at, input_scale_at, out_at = addresses
    key = None
    if looks is not None and (scale_ub is None or isinstance(scale_ub, float)):
        bits = (x_at | weight_at | out_at) & 15 | ((weight_scale_at | bias_at | input_scale_at) & 15) << 4
        key = (looks, bits, group_shape, scale_ub, out_dtype, use_fast_accum, batch_invariant)
    return forward(layer, addresses[1:5], _CALLS, key, x, x_at, out, out_at, stream)


@explains(linear)
def _explain_linear(call: SimpleNamespace) -> Explanation:
    options = call.group_shape, call.scale_ub, call.out_dtype, call.use_fast_accum, call.batch_invariant
    layer = Layer(call.weight, call.weight_scale, call.bias, call.input_scale, *options, prefetch_weight=False)
    return explanation(call.x, layer)


class Fp8Linear:
    """A linear layer with an FP8 weight, made once and called many times.

    Calls of several threads, on several streams and inside graph captures do not disturb each other: they share
    nothing but the weight, which must not change after the first call: products of later ones read it early.
    """

    def __init__(
        self,
        weight: object,
        weight_scale: object,
        *,
        bias: object = None,
        input_scale: object = None,
        group_shape: tuple[int, int] = PER_TOKEN,
        out_dtype: object = None,
        use_fast_accum: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        """Take an FP8 weight ``[n, k]`` and its scale; the arguments are those of `linear`."""
        self.weight = weight
        self.weight_scale = weight_scale
        self._layer = Layer(
            weight,
            weight_scale,
            bias,
            input_scale,
            GroupShape(*group_shape),
            None,
            out_dtype,
            use_fast_accum,
            batch_invariant,
            prefetch_weight=False,
        )
        operands.is_fp8(interop.view(weight, "weight"), "weight")
        self._addresses, self._looks = signature.looks(weight, weight_scale, bias, input_scale)
        self._calls: Calls[Call] = Calls()

    @classmethod
    def from_weight(
        cls,
        weight: object,
        *,
        bias: object = None,
        input_scale: object = None,
        dtype: object = "float8_e4m3fn",
        weight_group_shape: tuple[int, int] = PER_CHANNEL,
        group_shape: tuple[int, int] = PER_TOKEN,
        out_dtype: object = None,
        use_fast_accum: bool = True,
        batch_invariant: bool = False,
    ) -> "Fp8Linear":
        """Quantize a float32, float16 or bfloat16 weight ``[n, k]``.

        Args:
            weight: the weight, rows contiguous.
            bias: ``[n]`` in the result's dtype or fp32.
            input_scale: a given scale for static quantization of the input.
            dtype: the FP8 format.
            weight_group_shape: PER_CHANNEL, PER_TENSOR or BLOCK_128.
            group_shape: how inputs are quantized; BLOCK_128 weights need GROUP_128.
            out_dtype: the results' dtype; None is each input's own.
            use_fast_accum: as for `scaled_mm`.
            batch_invariant: as for `scaled_mm`.
        """
        data, scale = quantize(weight, dtype=dtype, group_shape=weight_group_shape)
        return cls(
            data,
            scale,
            bias=bias,
            input_scale=input_scale,
            group_shape=group_shape,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
            batch_invariant=batch_invariant,
        )

    def __call__(self, x: object, *, out: object = None, stream: object = None) -> Any:
        """Return ``x @ weight.T + bias`` for x ``[..., k]``."""
        if out is None:  # half of the looks
            (x_at,), looks = signature.looks(x)
            out_at = 0
        else:
            (x_at, out_at), looks = signature.looks(x, out)
        key = None if looks is None or self._looks is None else (looks, (x_at | out_at) & 15)
        result = forward(self._layer, self._addresses, self._calls, key, x, x_at, out, out_at, stream)
        if not self._layer.prefetch_weight:
            self._settle(x, stream)
        return result

    def _settle(self, x: object, stream: object) -> None:
        """Let later products read the weight early: the one just launched waited for whatever wrote it.

        Not so inside a capture, where nothing has run yet.
        """
        view = interop.view(x, "x")
        if view.target.platform == "host" or not device.capturing(interop.stream_of(view, stream)):
            self._layer, self._calls = self._layer._replace(prefetch_weight=True), Calls()

    def explain(self, x: object) -> Explanation:
        """Return which kernels a call with x would get, and why; `fp8core.explain` of this layer asks it."""
        return explanation(x, self._layer)
