"""`Fp8Linear` for JAX: a linear layer with a frozen FP8 weight, as a pytree."""

from dataclasses import dataclass
from typing import Any, Self, cast

import jax
import numpy as np

from fp8core.core import checks
from fp8core.core.operation import float32_number
from fp8core.core.scale_shapes import WEIGHT_GROUPS, known_group
from fp8core.ops import Quantized, linear, quantize
from fp8core.ops.quantized import quantized
from fp8core.problem import PER_CHANNEL, PER_TOKEN, GroupShape


@dataclass(frozen=True, eq=False)
class Fp8Linear:
    """A linear layer ``x @ weight.T + bias`` with a frozen FP8 weight, as a pytree.

    The arrays are leaves and the options are static. So layers pass through ``jax.jit``, ``jax.vmap`` and
    ``jax.lax.scan`` as arguments, ``jax.tree.map`` stacks them, ``jax.device_put`` shards them, and any checkpoint
    library saves them. Pass layers to jitted functions as arguments: a layer that a function closes over becomes a
    constant of its program.

    Gradients flow to inputs (straight through their quantization) and to the bias. The gradients of the weight and of
    the scales are zero.

    Args:
        weight: FP8 ``[n, k]``.
        weight_scale: float32 ``[n, 1]``, ``[1]``, ``[ceil(n / 128), ceil(k / 128)]`` or ``[n, ceil(k / 128)]``.
        bias: ``[n]`` in the results' dtype or float32, or None.
        input_scale: the static scale of inputs, a float32 array with one element; None quantizes them dynamically.
        weight_group_shape: the shape of the groups of the weight's elements that share a scale.
        group_shape: the group shape in which inputs are quantized: PER_TOKEN, PER_TENSOR or GROUP_128.
        out_dtype: the results' dtype, float32, float16 or bfloat16; None is the dtype of each input.
        use_fast_accum: as for `fp8core.scaled_mm`.
        batch_invariant: as for `fp8core.scaled_mm`.

    Raises:
        ShapeError: weight_group_shape or group_shape is not a pair of whole numbers, each -1 or 1 to 2**31 - 1.
        Fp8Error: a call raises the errors of `fp8core.linear`. The constructor does not check the arrays, as
            transformations put objects of their own in their place.

    Examples:
        >>> import jax, jax.numpy as jnp, fp8core.jax
        >>> layer = fp8core.jax.Fp8Linear.from_weight(jnp.eye(4, 32))
        >>> jax.jit(lambda layer, x: layer(x))(layer, jnp.ones((2, 32))).round(3).tolist()
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
        >>> [leaf.shape for leaf in jax.tree.leaves(layer)]
        [(4, 32), (4, 1)]
    """

    weight: Any
    weight_scale: Any
    bias: Any = None
    input_scale: Any = None
    weight_group_shape: tuple[int, int] = PER_CHANNEL
    group_shape: tuple[int, int] = PER_TOKEN
    out_dtype: Any = None
    use_fast_accum: bool = True
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        """Convert group shapes to `GroupShape`: the static parts of a pytree have to be hashable."""
        for name in ("weight_group_shape", "group_shape"):
            given = getattr(self, name)
            if type(given) is not GroupShape:  # in a layer that a transformation has unflattened, it is one already
                object.__setattr__(self, name, checks.group_shape(given, name))

    @classmethod
    def from_weight(
        cls,
        weight: Any,
        *,
        bias: Any = None,
        input_scale: Any = None,
        dtype: Any = "float8_e4m3fn",
        weight_group_shape: tuple[int, int] = PER_CHANNEL,
        group_shape: tuple[int, int] = PER_TOKEN,
        out_dtype: Any = None,
        use_fast_accum: bool = True,
        batch_invariant: bool = False,
    ) -> Self:
        """Quantize a weight ``[n, k]``, and return a layer with it; inside of ``jax.jit``, too.

        Args:
            weight: float32, float16 or bfloat16 ``[n, k]``.
            bias: as for the class.
            input_scale: as for the class, or a Python number.
            dtype: the FP8 format of the weight.
            weight_group_shape: PER_CHANNEL, PER_TENSOR, BLOCK_128 or GROUP_128.
            group_shape: as for the class; BLOCK_128 and GROUP_128 weights need GROUP_128.
            out_dtype: as for the class.
            use_fast_accum: as for the class.
            batch_invariant: as for the class.

        Raises:
            ScaleError, ShapeError, DTypeError: as for `fp8core.quantize`.
        """
        weight_group = checks.group_shape(weight_group_shape, "weight_group_shape")
        known_group(weight_group, WEIGHT_GROUPS, "weight_group_shape")
        number = float32_number(input_scale, "input_scale")
        q = quantize(weight, dtype=dtype, group_shape=weight_group)
        return cls(
            q.data,
            q.scale,
            bias,
            input_scale if number is None else jax.numpy.full(1, number, np.float32),
            weight_group,
            group_shape,
            out_dtype,
            use_fast_accum,
            batch_invariant,
        )

    def __call__(self, x: Any) -> Any:
        """Return ``x @ weight.T + bias``.

        Args:
            x: float32, float16 or bfloat16 ``[..., k]``, which the layer quantizes, or a `Quantized`.

        Returns:
            ``[..., n]`` of out_dtype.

        Raises:
            ShapeError, DTypeError, LayoutError, ScaleError, UnsupportedProblemError: as for `fp8core.linear`.
        """
        ready = isinstance(x, Quantized)
        weight_group = cast("GroupShape", self.weight_group_shape)
        weight = quantized(_frozen(self.weight), _frozen(self.weight_scale), weight_group)
        made: Any = linear(
            x,
            weight,
            bias=self.bias,
            input_scale=None if ready or self.input_scale is None else _frozen(self.input_scale),
            group_shape=PER_TOKEN if ready else self.group_shape,
            out_dtype=self.out_dtype,
            use_fast_accum=self.use_fast_accum,
            batch_invariant=self.batch_invariant,
        )
        return made


def _frozen(x: Any) -> Any:
    return jax.lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x


jax.tree_util.register_dataclass(
    Fp8Linear,
    data_fields=("weight", "weight_scale", "bias", "input_scale"),
    meta_fields=("weight_group_shape", "group_shape", "out_dtype", "use_fast_accum", "batch_invariant"),
)
