"""`Fp8Linear`: a linear layer with an FP8 weight, made once and called many times."""

from typing import Any, NamedTuple

from fp8core import interop
from fp8core.core.explaining import explanation_of
from fp8core.core.operation import Interned
from fp8core.core.prefetch import WeightHistory, capture_of
from fp8core.core.product import product_of
from fp8core.core.scale_shapes import WEIGHT_GROUPS, is_one_number, is_scale, known_group
from fp8core.core.specs import TensorSpec, flag, group, is_fp8, same_device, spec_of
from fp8core.errors import LayoutError, ScaleError, ShapeError
from fp8core.interop import Framework, TensorView, eager_only
from fp8core.interop.tensor import bytes_spanned, fill_number
from fp8core.ops.linear import ARRAYS, LINEAR_CALLS, OUT, LinearOptions, activation_group, input_format, result_dtype
from fp8core.ops.quantize import quantize_weight
from fp8core.ops.quantized import Quantized, parts
from fp8core.problem import BLOCK, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, WIDE, GroupShape, Target
from fp8core.table import Explanation


class Fp8Linear:
    """A linear layer ``x @ weight.T + bias`` with an FP8 weight.

    Its arrays are attributes that may be assigned, moved and written in place at any time: a call reads them where they
    are when it is made. Calls of several threads, on several streams and inside graph captures do not disturb each
    other. On sm_90 and later a product reads its weight before its predecessor on the stream has ended where that is
    safe (concepts/safety.md, programmatic launch and weights); what the library itself writes into a weight is noticed.

    Args:
        weight: FP8 ``[n, k]`` as it is stored, rows contiguous, or a `Quantized`.
        weight_scale: as for `linear`.
        bias: as for `linear`.
        input_scale: the scale of static quantization, and of inputs that are arrays of FP8.
        group_shape: as for `linear`.
        out_dtype: as for `linear`.
        use_fast_accum: as for `scaled_mm`.
        batch_invariant: as for `scaled_mm`.

    Raises:
        ShapeError, DTypeError, LayoutError, ScaleError, DeviceError: the arrays do not make a layer.

    Example:
        >>> import numpy as np, fp8core
        >>> layer = fp8core.Fp8Linear.from_weight(np.eye(4, 32, dtype=np.float32))
        >>> layer
        Fp8Linear(in_features=32, out_features=4, bias=False, weight=float8_e4m3fn, weight_scale=(4, 1), x per token)
        >>> layer(np.ones((2, 32), np.float32)).tolist()
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        weight: object,
        weight_scale: object = None,
        *,
        bias: object = None,
        input_scale: object = None,
        group_shape: tuple[int, int] = PER_TOKEN,
        out_dtype: object = None,
        use_fast_accum: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        self._options = LinearOptions(
            activation_group(group_shape),
            None,
            out_dtype,
            flag(use_fast_accum, "use_fast_accum"),
            flag(batch_invariant, "batch_invariant"),
        )
        if weight_scale is None or isinstance(weight, Quantized):
            weight, weight_scale, known = parts(weight, weight_scale, "weight", "weight_scale")
            self._options = self._options._replace(weight_group=known)
        self._put(weight=weight, weight_scale=weight_scale, bias=bias, input_scale=input_scale)

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
            weight_group_shape: PER_CHANNEL, PER_TENSOR, BLOCK_128 or GROUP_128, and no other.
            group_shape: how inputs are quantized; BLOCK_128 and GROUP_128 weights need GROUP_128.
            out_dtype: the results' dtype; None is each input's own.
            use_fast_accum: as for `scaled_mm`.
            batch_invariant: as for `scaled_mm`.
        """
        weight_group = group(weight_group_shape, "weight_group_shape")
        known_group(weight_group, WEIGHT_GROUPS, "weight_group_shape")
        return cls(
            quantize_weight(weight, dtype, weight_group),
            bias=bias,
            input_scale=input_scale,
            group_shape=group_shape,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
            batch_invariant=batch_invariant,
        )

    @eager_only
    def __call__(self, x: object, *, out: object = None, stream: object = None) -> Any:
        """Return ``x @ weight.T + bias`` for x ``[..., k]``: to be quantized, or FP8 as for `linear`."""
        weight, weight_scale, bias, input_scale = self._arrays
        options = self._interned
        if type(x) is Quantized:
            options = self._by_group.get(x.group_shape) or self._taking(x.group_shape)
            x, input_scale = x
        operands = x, weight, weight_scale, bias, input_scale, None, out
        return LINEAR_CALLS(operands, options, stream, self._history)[0][OUT]

    def _taking(self, group: GroupShape | None) -> Interned:
        """Return the options of a call whose x comes quantized by ``group``."""
        made = self._by_group[group] = LINEAR_CALLS.interned(self._options._replace(x_group=group))
        return made

    def explain(self, x: object, *, out: object = None) -> Explanation:
        """Return which kernels a call with x would get, and why; `fp8core.explain` of this layer asks it."""
        return explanation_of(self, x, out=out)

    @property
    def in_features(self) -> int:
        """The extent k of inputs' last axis."""
        return self._shape[1]

    @property
    def out_features(self) -> int:
        """The extent n of results' last axis."""
        return self._shape[0]

    @property
    def group_shape(self) -> GroupShape:
        """How inputs are quantized."""
        shape: GroupShape = self._options.group_shape
        return shape

    @property
    def weight(self) -> Any:
        """FP8 ``[n, k]``; a `Quantized` may be assigned, which brings its scale."""
        return self._arrays[0]

    @weight.setter
    def weight(self, weight: object) -> None:
        if isinstance(weight, Quantized):
            self._options = self._options._replace(weight_group=weight.group_shape)
            self._put(weight=weight.data, weight_scale=weight.scale)
        else:
            self._put(weight=weight)

    @property
    def weight_scale(self) -> Any:
        """The scale of the weight, fp32."""
        return self._arrays[1]

    @weight_scale.setter
    def weight_scale(self, scale: object) -> None:
        self._put(weight_scale=scale)

    @property
    def bias(self) -> Any:
        """``[n]`` in the result's dtype or fp32, or None."""
        return self._arrays[2]

    @bias.setter
    def bias(self, bias: object) -> None:
        self._put(bias=bias)

    @property
    def input_scale(self) -> Any:
        """The given scale of inputs, fp32, or None."""
        return self._arrays[3]

    @input_scale.setter
    def input_scale(self, scale: object) -> None:
        self._put(input_scale=scale)

    def _put(self, **changed: Any) -> None:
        """Take new arrays, after checking the layer that they make; the history of its weight begins anew."""
        arrays = {**dict(zip(ARRAYS, getattr(self, "_arrays", (None,) * 4), strict=True)), **changed}
        checked = check_layer(self._options, **arrays)
        self._interned = LINEAR_CALLS.interned(self._options)
        self._by_group: dict[GroupShape | None, Interned] = {}
        self._arrays: tuple[Any, ...] = checked.arrays
        self._shape: tuple[int, int] = checked.shape
        self._history = checked.history

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: its arrays and options; where they lie is the copy's own affair.

        FP8 travels as bytes with the name of its dtype: not every pickle knows a framework's FP8 arrays.
        """
        weight, *others = self._arrays
        name = interop.dtype_name(weight.dtype)
        try:
            weight = interop.reinterpret(weight, "uint8")
        except LayoutError:  # JAX, whose arrays have one dtype for life
            name = ""
        return {"arrays": (weight, *others), "dtype": name, "options": tuple(self._options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weight, *others = state["arrays"]
        if state["dtype"]:
            weight = interop.reinterpret(weight, state["dtype"])
        self._options = LinearOptions(*state["options"])
        self._put(**dict(zip(ARRAYS, (weight, *others), strict=True)))

    def __repr__(self) -> str:
        weight, scale, bias, input_scale = self._arrays
        x = {PER_TOKEN: "per token", PER_TENSOR: "per tensor", GROUP_128: "by groups of 1x128"}[self.group_shape]
        static = ", static" if input_scale is not None else ""
        return (
            f"Fp8Linear(in_features={self.in_features}, out_features={self.out_features}, bias={bias is not None}, "
            f"weight={interop.dtype_name(weight.dtype)}, weight_scale={tuple(scale.shape)}, x {x}{static})"
        )


def _array_of(number: float, framework: Framework, target: Target) -> Any:
    """Return a number as an fp32 array of a framework, made on its current stream."""
    made, stream = framework.empty((1,), "float32", target), framework.stream(target)
    fill_number(made.pointer, number, target, stream)
    return framework.wrap(made.array, stream)


def _check_input_scale(scale: TensorSpec, group_shape: GroupShape, groups: int) -> None:
    """Refuse a scale that no input has: one number, or for inputs that come quantized one a token or a group."""
    if is_one_number(scale.shape):
        return
    needs = "one number, of shape (), (1,) or (1, 1)"
    if group_shape == PER_TOKEN:
        able, needs = len(scale.shape) == 1 or scale.shape[-1:] == (1,), f"{needs}, or (m, 1) or (m,) per token"
    elif group_shape == GROUP_128:
        able, needs = len(scale.shape) > 1 and scale.shape[-1] == groups, f"{needs}, or (m, {groups}) by groups"
    else:
        able = False
    if not able:
        raise ShapeError(f"{scale.name} needs {needs}, got shape {scale.shape}")


class _Checked(NamedTuple):
    arrays: tuple[Any, ...]
    shape: tuple[int, int]
    history: WeightHistory


def check_layer(options: LinearOptions, weight: Any, weight_scale: Any, bias: Any, input_scale: Any) -> _Checked:
    """Check the arrays of a layer as far as they can be without an input, and begin the history of its weight.

    Numbers become arrays beside the weight, once.
    """
    first = interop.view(weight, ARRAYS[0])
    at = spec_of(first, "weight")
    is_fp8(at)
    if len(at.shape) != 2:
        raise ShapeError(f"weight needs two axes [n, k], got shape {at.shape}")
    framework, target = first.framework, first.target
    arrays: list[Any] = [weight]
    views: list[TensorView | None] = [first]
    for x, name in zip((weight_scale, bias, input_scale), ARRAYS[1:], strict=True):
        number = None if x is None or name == "bias" else interop.scalar(x)
        given = x if number is None else _array_of(number, framework, target)
        arrays.append(given)
        views.append(None if given is None else interop.view(given, name))
    specs = [None if view is None else spec_of(view, name) for view, name in zip(views, ARRAYS, strict=True)]
    scale, added, of_input = specs[1:]
    if scale is None:
        raise ScaleError("weight needs weight_scale, or to be a Quantized, got neither")
    n, k = at.shape
    x = TensorSpec("x", input_format(at.dtype), (1, k), (k, 1), target)
    groups = {PER_TENSOR: (1,), PER_TOKEN: (1, 1), GROUP_128: (1, -(-k // BLOCK))}[options.group_shape]
    x_scale = TensorSpec("input_scale", "float32", groups, (1,) * len(groups), target)
    own = "bfloat16" if added is None or added.dtype not in WIDE else added.dtype
    product_of(
        x,
        at,
        x_scale,
        scale,
        added,
        result_dtype(options.out_dtype, own),
        None,
        None,
        stored=True,
        group_a=options.group_shape,
        group_b=options.weight_group,
    )
    if of_input is not None:
        is_scale(of_input)
        same_device(at, of_input)
        _check_input_scale(of_input, options.group_shape, -(-k // BLOCK))
    history = WeightHistory()
    if target.platform != "host":
        addresses = [0, *(0 if view is None else view.pointer for view in views)]
        spans = [0, *(0 if s is None else bytes_spanned(s.shape, s.strides, s.dtype) for s in specs)]
        history.know(addresses, spans, capture_of(framework.stream(target)))
    return _Checked(tuple(arrays), (n, k), history)
