"""`Fp8Linear`: a linear layer with an FP8 weight, made once and called many times."""

from copy import deepcopy
from types import MemberDescriptorType
from typing import Any, Final, Self, Unpack, overload

from fp8core.core import checks
from fp8core.core.explaining import explanation_of
from fp8core.core.operation import Interned
from fp8core.core.product import known_activation
from fp8core.core.scale_shapes import WEIGHT_GROUPS, known_group
from fp8core.interop import eager_only
from fp8core.interop.float8 import Float8Array
from fp8core.ops.layer_checks import REPLACING, State, check_layer, specs_before_quantizing, state_of
from fp8core.ops.layer_options import LayerOptions
from fp8core.ops.layer_weight import aligned_rows
from fp8core.ops.linear import ARRAYS, LINEAR_CALLS, OUT, LinearOptions, activation_group
from fp8core.ops.pickled import to_pickle
from fp8core.ops.quantize import quantize_by, quantize_operation
from fp8core.ops.quantized import Quantized, parts
from fp8core.problem import GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, GroupShape
from fp8core.table import Explanation
from fp8core.types import ActivationName, Array, ArrayT, CallKeywords, Fp8DType, NumpyArray, Scale, Untyped, WideDType

QUANTIZE_WEIGHT_CALLS: Final = quantize_operation("weight")


class Fp8Linear(LayerOptions):
    """A linear layer ``activation(x @ weight.T + bias)`` with an FP8 weight.

    Its arrays are attributes that may be assigned, moved and written in place at any time: each call reads them where
    they are then. Calls by several threads, on several streams and inside graph captures do not disturb each other. On
    sm_90 and later a product reads its weight before the preceding kernel on the stream has ended, where that is safe
    (concepts/safety.md, programmatic launch and weights); the library keeps track of its own writes to a weight.

    Args:
        weight: FP8 ``[n, k]`` as it is stored, rows contiguous, or a `Quantized`.
        weight_scale: as for `linear`.
        bias: ``[n]`` in the results' dtype or float32.
        activation: None, "gelu", "gelu_tanh" or "silu", as for `scaled_mm`.
        input_scale: the scale for static quantization, and for inputs that are FP8 arrays.
        group_shape: how inputs are quantized: PER_TOKEN, PER_TENSOR or GROUP_128.
        out_dtype: the results' dtype: float32, float16 or bfloat16; None means that of each input.
        use_fast_accum: as for `scaled_mm`.
        batch_invariant: as for `scaled_mm`.

    Raises:
        ShapeError, DTypeError, LayoutError, ScaleError, DeviceError: the arrays do not fit together. Assigning an
            array that does not fit raises these too, and changes nothing.

    Examples:
        >>> import numpy as np, fp8core
        >>> layer = fp8core.Fp8Linear.from_weight(np.eye(4, 32, dtype=np.float32))
        >>> layer
        Fp8Linear(in_features=32, out_features=4, bias=False, weight=float8_e4m3fn, weight_scale=(4, 1), x per token)
        >>> layer(np.ones((2, 32), np.float32)).round(3)
        array([[1., 1., 1., 1.],
               [1., 1., 1., 1.]], dtype=float32)
        >>> layer.bias = np.full(4, 0.5, np.float32)
        >>> layer(np.ones((1, 32), np.float32)).round(3)
        array([[1.5, 1.5, 1.5, 1.5]], dtype=float32)
    """

    def __init__(
        self,
        weight: Array | Quantized[object, object],
        weight_scale: Scale | None = None,
        *,
        bias: Array | None = None,
        activation: ActivationName | None = None,
        input_scale: Scale | None = None,
        group_shape: tuple[int, int] = PER_TOKEN,
        out_dtype: WideDType | None = None,
        use_fast_accum: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        options = _options(group_shape, out_dtype, use_fast_accum, batch_invariant, activation)
        if weight_scale is None or isinstance(weight, Quantized):
            data, scale, known = parts(weight, weight_scale, "weight", "weight_scale")
            options = options._replace(weight_group=known)
        else:
            data, scale = weight, weight_scale
        self._take(options, data, scale, bias, input_scale)

    @classmethod
    def from_weight(
        cls,
        weight: Array,
        *,
        bias: Array | None = None,
        activation: ActivationName | None = None,
        input_scale: Scale | None = None,
        dtype: Fp8DType = "float8_e4m3fn",
        weight_group_shape: tuple[int, int] = PER_CHANNEL,
        group_shape: tuple[int, int] = PER_TOKEN,
        out_dtype: WideDType | None = None,
        use_fast_accum: bool = True,
        batch_invariant: bool = False,
    ) -> "Fp8Linear":
        """Quantize a weight ``[n, k]``, and make a layer of it.

        On a GPU the row stride of its codes is a multiple of 16 bytes for any k, so that products of any k run on the
        kernels that need it. (JAX has no such arrays.) `Fp8Linear` itself takes FP8 codes, whose rows stay as they are.

        Args:
            weight: float32, float16 or bfloat16 ``[n, k]``, rows contiguous.
            bias: ``[n]`` in the results' dtype or float32.
            activation: as for the class.
            input_scale: a given scale for static quantization of the input.
            dtype: the FP8 format of the weight.
            weight_group_shape: PER_CHANNEL, PER_TENSOR, BLOCK_128 or GROUP_128, and no other.
            group_shape: how inputs are quantized; BLOCK_128 and GROUP_128 weights need GROUP_128.
            out_dtype: the results' dtype: float32, float16 or bfloat16; None means that of each input.
            use_fast_accum: as for `scaled_mm`.
            batch_invariant: as for `scaled_mm`.

        Raises:
            ShapeError, DTypeError, LayoutError, ScaleError, DeviceError: the arrays do not fit together.

        Examples:
            >>> import numpy as np, fp8core
            >>> weight = np.ones((256, 256), np.float32)
            >>> options = {"weight_group_shape": fp8core.BLOCK_128, "group_shape": fp8core.GROUP_128}
            >>> fp8core.Fp8Linear.from_weight(weight, **options).weight_scale.shape
            (2, 2)
        """
        weight_group = checks.group_shape(weight_group_shape, "weight_group_shape")
        known_group(weight_group, WEIGHT_GROUPS, "weight_group_shape")
        made = cls.__new__(cls)
        options = _options(group_shape, out_dtype, use_fast_accum, batch_invariant, activation)
        options = options._replace(weight_group=weight_group)
        check_layer(options, specs_before_quantizing(weight, bias, input_scale, dtype, weight_group))
        quantized = quantize_by(QUANTIZE_WEIGHT_CALLS, weight, dtype, weight_group, out=aligned_rows(weight, dtype))
        made._take(options, *quantized, bias, input_scale)
        return made

    @overload
    def __call__(self, x: Float8Array | Quantized[Float8Array, Untyped], **keywords: Unpack[CallKeywords]) -> Any: ...
    @overload
    def __call__(
        self, x: NumpyArray | Quantized[object, NumpyArray], **keywords: Unpack[CallKeywords]
    ) -> NumpyArray: ...
    @overload
    def __call__(self, x: ArrayT | Quantized[object, ArrayT], **keywords: Unpack[CallKeywords]) -> ArrayT: ...
    @eager_only
    def __call__(self, x: object, *, out: object = None, stream: object = None) -> Any:
        """Return ``activation(x @ weight.T + bias)``.

        Args:
            x: float32, float16 or bfloat16 ``[..., k]``, which is quantized; or FP8 as for `linear`.
            out: an array ``[..., n]`` for the result.
            stream: the stream to launch on, as for `quantize`.

        Returns:
            ``[..., n]`` of out_dtype, in the framework of x.

        Raises:
            ShapeError, DTypeError, LayoutError, ScaleError, DeviceError, UnsupportedProblemError: as for `linear`.
        """
        state = self._state
        (weight, weight_scale, bias, input_scale), options, by_group, history, _, _, _, _ = state
        if isinstance(x, Quantized):
            options = by_group.get(x.group_shape) or self._taking(state, x.group_shape)
            x, input_scale = x
        operands = x, weight, weight_scale, bias, input_scale, None, out
        return LINEAR_CALLS(operands, options, stream, history)[0][OUT]

    def _taking(self, state: State, group: GroupShape | None) -> Interned:
        """Return the options of a call whose x is already quantized by ``group``."""
        made = state.by_group[group] = LINEAR_CALLS.interned(state.options._replace(x_group=group))
        return made

    def explain(self, x: object, *, out: object = None) -> Explanation:
        """Return which kernels a call would get, and why: ``fp8core.explain(layer, x, out=out)``.

        Examples:
            >>> import numpy as np, fp8core
            >>> layer = fp8core.Fp8Linear.from_weight(np.eye(4, 32, dtype=np.float32))
            >>> layer.explain(fp8core.ArraySpec((2, 32), "float32")).chosen
            'host'
        """
        return explanation_of(self, x, out=out)

    @property
    def in_features(self) -> int:
        """The extent k of the inputs' last axis."""
        return self._state.shape[1]

    @property
    def out_features(self) -> int:
        """The extent n of the results' last axis."""
        return self._state.shape[0]

    @property
    def weight(self) -> Any:
        """FP8 ``[n, k]``; assigning a `Quantized` assigns its scale, too."""
        return self._state.arrays[0]

    @weight.setter
    def weight(self, weight: object) -> None:
        if isinstance(weight, Quantized):
            options = self._state.options._replace(weight_group=weight.group_shape)
            self._put(options, weight=weight.data, weight_scale=weight.scale)
        else:
            self._put(weight=weight)

    @property
    def weight_scale(self) -> Any:
        """The scale of the weight, float32."""
        return self._state.arrays[1]

    @weight_scale.setter
    def weight_scale(self, scale: object) -> None:
        self._put(weight_scale=scale)

    @property
    def bias(self) -> Any:
        """``[n]`` in the results' dtype or float32, or None."""
        return self._state.arrays[2]

    @bias.setter
    def bias(self, bias: object) -> None:
        self._put(bias=bias)

    @property
    def input_scale(self) -> Any:
        """The given scale of inputs, float32, or None."""
        return self._state.arrays[3]

    @input_scale.setter
    def input_scale(self, scale: object) -> None:
        self._put(input_scale=scale)

    def _put(self, options: LinearOptions | None = None, /, **changed: Any) -> None:
        """Replace some arrays, and the options if given; begin again if another thread has replaced some meanwhile."""
        while True:
            state = self._state
            arrays = {**dict(zip(ARRAYS, state.arrays, strict=True)), **changed}
            made = state_of(state.options if options is None else options, **arrays)
            with REPLACING.held:
                if self._state is state:
                    self._state = made
                    return

    def _take(self, options: LinearOptions, *arrays: Any) -> None:
        """Check all arrays, in the order of `ARRAYS`, and take them."""
        self._state = state_of(options, *arrays)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the arrays with ``memo``: a weight or scale that other objects share stays shared among the copies."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made._take(self._state.options, *deepcopy(self._state.arrays, memo))
        made._add(deepcopy(self._added(), memo))
        return made

    def __copy__(self) -> Self:
        """Return a layer that shares the arrays."""
        made = type(self).__new__(type(self))
        made._take(self._state.options, *self._state.arrays)
        made._add(self._added())
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return arrays, options and added attributes, without the state that depends on addresses."""
        weight, *others = self._state.arrays
        arrays, options = (to_pickle(weight), *others), tuple(self._state.options)
        added = {name: to_pickle(value) for name, value in self._added().items()}
        return {"arrays": arrays, "options": options, "added": added}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._take(LinearOptions(*state["options"]), *state["arrays"])
        self._add(state.get("added", {}))  # older pickles have none

    def _added(self) -> dict[str, Any]:
        """Return the attributes that a subclass or a caller has added, also those in slots."""
        state = object.__getstate__(self)
        attributes, slots = state if isinstance(state, tuple) else (state, {})
        return {name: value for name, value in {**attributes, **slots}.items() if name != "_state"}

    def _add(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            if isinstance(getattr(type(self), name, None), MemberDescriptorType):  # a slot
                object.__setattr__(self, name, value)
            else:
                self.__dict__[name] = value

    def __repr__(self) -> str:
        (_, _, bias, input_scale), *_, dtype, scale_shape = self._state
        x = {PER_TOKEN: "per token", PER_TENSOR: "per tensor", GROUP_128: "by groups of 1x128"}[self.group_shape]
        static = ", static" if input_scale is not None else ""
        activation = f", activation={self._state.options.activation}" if self._state.options.activation else ""
        return (
            f"Fp8Linear(in_features={self.in_features}, out_features={self.out_features}, bias={bias is not None}, "
            f"weight={dtype}, weight_scale={scale_shape}, x {x}{static}{activation})"
        )


def _options(
    group_shape: Any, out_dtype: Any, use_fast_accum: Any, batch_invariant: Any, activation: Any
) -> LinearOptions:
    return LinearOptions(
        activation_group(group_shape),
        None,
        out_dtype,
        checks.flag(use_fast_accum, "use_fast_accum"),
        checks.flag(batch_invariant, "batch_invariant"),
        activation=known_activation(activation) or None,
    )
