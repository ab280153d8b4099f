"""FP8 linear layers: `linear` quantizes and multiplies, `Fp8Linear` is its prepared form."""

from typing import Any, NamedTuple

from fp8core import arrays
from fp8core.arrays import TensorView
from fp8core.dispatch import Explanation
from fp8core.errors import ScaleError
from fp8core.kernels.quantize import QUANTIZE
from fp8core.kernels.scaled_mm import SCALED_MM
from fp8core.ops import operands
from fp8core.ops.explain import explains
from fp8core.ops.product import Product, product_of, run
from fp8core.ops.quantize import EPS, Scaling, quantize, scaling
from fp8core.problem import FORMATS, PER_CHANNEL, PER_TENSOR, PER_TOKEN, GroupShape, Quantize

SCRATCH_ALIGNMENT = 256


class _Layer(NamedTuple):
    """A weight with its scale and bias, viewed, and how inputs are quantized for it."""

    weight: TensorView
    weight_scale: TensorView
    bias: object
    input_scale: object
    group_shape: tuple[int, int]
    scale_ub: object
    out_dtype: object
    use_fast_accum: bool
    batch_invariant: bool


class _Quantization(NamedTuple):
    """The quantization of an input into one scratch: its problem, and where codes and scales lie in it."""

    how: Scaling
    at: operands.Matrix
    key: tuple[Any, ...]
    scale_shape: tuple[int, ...]
    scale_strides: tuple[int, int]
    scale_offset: int
    bytes: int


def _quantization(x: TensorView, layer: _Layer) -> _Quantization:
    operands.is_wide(x, "x")
    at = operands.matrix(x, "x")
    dtype = layer.weight.dtype
    how = scaling(dtype, layer.group_shape, layer.input_scale, layer.scale_ub, "float32", "k", EPS, x, at.rows, at.cols)
    rows, cols = how.group_shape.scale_shape(at.rows, at.cols)
    strides = (0, 0) if how.group_shape == PER_TENSOR else (1, rows)  # groups as block-scaled products want them
    bits = operands.octets(x, at.stride, 0, at.cols)
    layout = "mn" if cols > 1 else "k"
    key = (x.target, x.dtype, dtype, how.group_shape, how.given is not None, how.scale_format, layout, at.cols, bits)
    offset = -(-at.rows * at.cols // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    shape = (1,) if how.group_shape == PER_TENSOR else (rows, cols)
    return _Quantization(how, at, key, shape, strides, offset, offset + 4 * rows * cols)


def _product(x: TensorView, q: _Quantization, layer: _Layer, scratch: int, dtype: object) -> Product:
    """Return the product of the codes and scales that the quantization of x leaves at ``scratch``."""
    codes = TensorView(
        scratch, layer.weight.dtype, (q.at.rows, q.at.cols), (q.at.cols, 1), x.target, x.framework, x.owner
    )
    scale = q.how.given or TensorView(
        scratch + q.scale_offset,
        "float32",
        q.scale_shape,
        q.scale_strides[: len(q.scale_shape)],
        x.target,
        x.framework,
        x.owner,
    )
    return product_of(
        codes._replace(shape=x.shape, strides=_contiguous(x.shape)),
        layer.weight,
        scale,
        layer.weight_scale,
        layer.bias,
        dtype,
        None,
        None,
        stored=True,
    )


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _ready_made(x: TensorView, layer: _Layer) -> Product:
    """Return the product of an x that is FP8 already."""
    if layer.input_scale is None:
        raise ScaleError(f"x of {x.dtype} needs input_scale")
    scale = arrays.view(layer.input_scale, "input_scale")
    dtype = "bfloat16" if layer.out_dtype is None else layer.out_dtype
    return product_of(x, layer.weight, scale, layer.weight_scale, layer.bias, dtype, None, None, stored=True)


def _forward(x: TensorView, layer: _Layer, out: object, stream: object) -> Any:
    if x.dtype in FORMATS:
        return run(_ready_made(x, layer), layer.use_fast_accum, layer.batch_invariant, out, stream)
    q = _quantization(x, layer)
    dtype = x.dtype if layer.out_dtype is None else layer.out_dtype
    work = arrays.stream_of(x, stream, *q.how.others)
    scratch = x.framework.scratch(max(q.bytes, 1), x.target, None if stream is None else work)
    product = _product(x, q, layer, scratch.pointer, dtype)

    def codes_first() -> None:
        QUANTIZE.plan(q.key)(
            work,
            x.pointer,
            q.at.stride,
            scratch.pointer,
            q.at.cols,
            product.scale_a.pointer,
            *(q.how.strides if q.how.given is not None else q.scale_strides),
            q.at.rows,
            q.at.rows,
            q.how.upper_pointer,
            q.how.upper_value,
            q.how.eps,
        )

    return run(product, layer.use_fast_accum, layer.batch_invariant, out, stream, before=codes_first)


def _explanation(x: TensorView, layer: _Layer) -> Explanation:
    if x.dtype in FORMATS:
        return _explained(_ready_made(x, layer), layer)
    q = _quantization(x, layer)
    product = _product(x, q, layer, 0, x.dtype if layer.out_dtype is None else layer.out_dtype)
    return _explained(product, layer)._replace(before=(QUANTIZE.explain(Quantize(*q.key)),))


def _explained(product: Product, layer: _Layer) -> Explanation:
    return SCALED_MM.explain(product.problem(layer.use_fast_accum, layer.batch_invariant, 0, product.n))


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
    layer = _Layer(
        arrays.view(weight, "weight"),
        arrays.view(weight_scale, "weight_scale"),
        bias,
        input_scale,
        group_shape,
        scale_ub,
        out_dtype,
        use_fast_accum,
        batch_invariant,
    )
    return _forward(arrays.view(x, "x"), layer, out, stream)


@explains(linear)
def _explain_linear(
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
) -> Explanation:
    layer = _Layer(
        arrays.view(weight, "weight"),
        arrays.view(weight_scale, "weight_scale"),
        bias,
        input_scale,
        group_shape,
        scale_ub,
        out_dtype,
        use_fast_accum,
        batch_invariant,
    )
    return _explanation(arrays.view(x, "x"), layer)


class Fp8Linear:
    """A linear layer with an FP8 weight, made once and called many times.

    Calls of several threads, on several streams and inside graph captures do not disturb each other: they share
    nothing but the weight.
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
        self._layer = _Layer(
            arrays.view(weight, "weight"),
            arrays.view(weight_scale, "weight_scale"),
            bias,
            input_scale,
            GroupShape(*group_shape),
            None,
            out_dtype,
            use_fast_accum,
            batch_invariant,
        )
        operands.is_fp8(self._layer.weight, "weight")

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
        return _forward(arrays.view(x, "x"), self._layer, out, stream)

    def explain(self, x: object) -> Explanation:
        """Return which kernels a call with x would get, and why; `fp8core.explain` of this layer asks it."""
        return _explanation(arrays.view(x, "x"), self._layer)
