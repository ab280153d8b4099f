"""FP8 data together with its scales: what quantization gives, and what every function that takes both takes as one."""

from typing import Any, NamedTuple, Self

from fp8core.core import specs
from fp8core.errors import ScaleError
from fp8core.interop import dtype_name
from fp8core.interop.tensor import new_tuple
from fp8core.problem import GroupShape


class _Pair(NamedTuple):
    data: Any
    scale: Any


class Quantized(_Pair):
    """FP8 ``data`` and the ``scale`` to multiply it by: a pair (``data, scale = quantize(x)``) that knows its groups.

    Args:
        data: FP8 ``[..., cols]``.
        scale: fp32 or float8_e8m0fnu, one number a group.
        group_shape: ``(rows, cols)`` of the elements that share a scale; None where nobody said, as for a pair made
            of two arrays.

    Example:
        >>> import numpy as np, fp8core
        >>> q = fp8core.quantize(np.ones((2, 256), np.float32), group_shape=(1, 128))
        >>> q.group_shape, q.dtype, q.scale.shape
        (GroupShape(rows=1, cols=128), 'float8_e4m3fn', (2, 2))
        >>> bool((q.dequantize() == 1).all())
        True
    """

    group_shape: GroupShape | None

    def __new__(cls, data: Any, scale: Any, group_shape: tuple[int, int] | None = None) -> Self:
        """Make a pair; data and scale are unchecked until the pair is used."""
        made = super().__new__(cls, data, scale)
        made.group_shape = None if group_shape is None else specs.group(group_shape)
        return made

    @property
    def dtype(self) -> str:
        """The name of the data's FP8 format."""
        return dtype_name(self.data.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data."""
        return tuple(self.data.shape)

    @property
    def T(self) -> "Quantized":  # noqa: N802 - NumPy's name
        """The transpose of a matrix over the same memory: a stored weight ``[n, k]`` as `scaled_mm` takes it."""
        group = None if self.group_shape is None else GroupShape(self.group_shape.cols, self.group_shape.rows)
        return quantized(self.data.T, self.scale.T, group)

    def dequantize(self, dtype: object = "float32", *, out: object = None, stream: object = None) -> Any:
        """Return ``data * scale``, formed in fp32 and rounded once to ``dtype``: `fp8core.dequantize` of this pair."""
        from fp8core.ops.quantize import dequantize

        return dequantize(self, dtype=dtype, out=out, stream=stream)

    def __repr__(self) -> str:
        group = None if self.group_shape is None else tuple(self.group_shape)
        return f"Quantized(data={self.data!r}, scale={self.scale!r}, group_shape={group})"


def quantized(data: Any, scale: Any, group_shape: GroupShape | None) -> Quantized:
    """Return a pair in half of the time that its constructor takes."""
    made: Quantized = new_tuple(Quantized, (data, scale))
    made.group_shape = group_shape
    return made


def parts(x: Any, scale: Any, name: str, scale_name: str) -> tuple[Any, Any, GroupShape | None]:
    """Return data, scale and group shape of an operand that is a `Quantized`, or an array with its scale beside it.

    Raises:
        ScaleError: a `Quantized` comes with another scale, or an array without one.
    """
    if isinstance(x, Quantized):
        if scale is not None:
            raise ScaleError(f"{scale_name} needs to be left out where {name} is a Quantized, got both")
        return x.data, x.scale, x.group_shape
    if scale is None:
        raise ScaleError(f"{name} needs {scale_name}, or to be a Quantized, got neither")
    return x, scale, None
