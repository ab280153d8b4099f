"""FP8 data together with its scales: the result of a quantization, and one operand of functions that take both."""

from copy import deepcopy
from typing import Any, Generic, NamedTuple, Self

from fp8core.core import checks
from fp8core.errors import ScaleError, ShapeError
from fp8core.interop import dtype_name, scalar
from fp8core.interop.tensor import new_tuple
from fp8core.ops.pickled import to_pickle
from fp8core.problem import GroupShape
from fp8core.types import Array, ArrayT_co, DataT_co, Stream, WideDType


class _Pair(NamedTuple, Generic[DataT_co, ArrayT_co]):
    data: DataT_co
    scale: ArrayT_co


class Quantized(_Pair[DataT_co, ArrayT_co]):
    """FP8 ``data`` and the ``scale`` to multiply it by: a pair (``data, scale = quantize(x)``) with its group shape.

    The class has two type parameters: the type of the data, and that of the framework's other arrays. They differ only
    for CuPy, where FP8 data is a `Float8Array`.

    Args:
        data: FP8 ``[..., cols]``.
        scale: float32 or float8_e8m0fnu, one number per group: ``value = data * scale``.
        group_shape: ``(rows, cols)`` of the elements that share a scale; None if it is not known, as in a pair made
            from two arrays. Functions that need it then require ``group_shape=``.

    Raises:
        ShapeError: group_shape is not a pair of whole numbers, each -1 or 1 to 2**31 - 1. Data and scale are checked
            when the pair is used.

    Examples:
        >>> import numpy as np, fp8core
        >>> q = fp8core.quantize(np.ones((2, 256), np.float32), group_shape=(1, 128))
        >>> q.group_shape, q.dtype, q.scale.shape
        (GroupShape(rows=1, cols=128), 'float8_e4m3fn', (2, 2))
        >>> bool((q.dequantize() == 1).all())
        True
    """

    group_shape: GroupShape | None = None

    def __new__(cls, data: DataT_co, scale: ArrayT_co, group_shape: tuple[int, int] | None = None) -> Self:
        """Make a pair; data and scale are unchecked until the pair is used."""
        made: Self = new_tuple(cls, (data, scale))
        made.group_shape = None if group_shape is None else checks.group_shape(group_shape)
        return made

    def _replace(self, /, **fields: Any) -> Self:
        """Return a pair with other data or another scale, and the same group shape."""
        made = super()._replace(**fields)
        made.group_shape = self.group_shape
        return made

    __replace__ = _replace  # what `copy.replace` calls

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle torch's codes as bytes."""
        added = {name: to_pickle(value) for name, value in self.__dict__.items()}
        return _of_kind, (type(self), to_pickle(self.data), to_pickle(self.scale)), added

    def __copy__(self) -> Self:
        """Return a pair of the same arrays."""
        made: Self = _of_kind(type(self), self.data, self.scale, self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a pair of copies, made with ``memo``: what other objects share stays shared among the copies."""
        made: Self = _of_kind(type(self), *deepcopy((self.data, self.scale), memo))
        memo[id(self)] = made  # before the attributes, which may refer to the pair
        made.__dict__.update(deepcopy(self.__dict__, memo))
        return made

    @property
    def dtype(self) -> str:
        """The name of the data's FP8 format."""
        data: Any = self.data
        return dtype_name(data.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data."""
        data: Any = self.data
        return tuple(data.shape)

    @property
    def T(self) -> "Quantized[DataT_co, ArrayT_co]":  # noqa: N802 - NumPy's name
        """The transpose of a matrix over the same memory: turns a stored weight ``[n, k]`` into ``b`` of `scaled_mm`.

        Raises:
            ShapeError: the data has not two axes: the group shape is that of the last two, and could not be turned.

        Examples:
            >>> import numpy as np, fp8core
            >>> fp8core.quantize(np.ones((2, 32), np.float32)).T.shape
            (32, 2)
        """
        data: Any = self.data
        scale: Any = self.scale
        if len(data.shape) != 2:
            raise ShapeError(f"T needs data of two axes, got shape {tuple(data.shape)}")
        turned = scale if scalar(scale) is not None or len(scale.shape) < 2 else scale.T  # torch turns matrices only
        group = None if self.group_shape is None else GroupShape(self.group_shape.cols, self.group_shape.rows)
        return quantized(data.T, turned, group)

    def dequantize(
        self, dtype: WideDType = "float32", *, out: Array | None = None, stream: Stream | None = None
    ) -> ArrayT_co:
        """Return ``data * scale``, computed in float32 and rounded once to ``dtype``, as `fp8core.dequantize` does.

        Args:
            dtype: float32, float16 or bfloat16.
            out: an array of that dtype and of the data's shape for the result.
            stream: the stream to launch on, as for `fp8core.quantize`.

        Raises:
            ScaleError, DTypeError, ShapeError, LayoutError, DeviceError, UnsupportedProblemError: as for
                `fp8core.dequantize`.

        Examples:
            >>> import numpy as np, fp8core
            >>> fp8core.quantize(np.array([[1.0, -448.0]], np.float32)).dequantize().tolist()
            [[1.0, -448.0]]
        """
        from fp8core.ops.dequantize import dequantize

        whole: Quantized[Any, Any] = self
        made: ArrayT_co = dequantize(whole, dtype=dtype, out=out, stream=stream)
        return made

    def __repr__(self) -> str:
        group = None if self.group_shape is None else tuple(self.group_shape)
        return f"Quantized(data={self.data!r}, scale={self.scale!r}, group_shape={group})"


def _of_kind(kind: Any, data: Any, scale: Any, attributes: Any = ()) -> Any:
    """Return a pair of a subclass, with its attributes. Pickles name this function."""
    made = new_tuple(kind, (data, scale))
    made.__dict__.update(attributes)
    return made


def quantized(data: Any, scale: Any, group_shape: GroupShape | None) -> Quantized[Any, Any]:
    """Make a pair, in half the time of its constructor."""
    made: Quantized[Any, Any] = new_tuple(Quantized, (data, scale))
    made.group_shape = group_shape
    return made


def parts(x: Any, scale: Any, name: str, scale_name: str) -> tuple[Any, Any, GroupShape | None]:
    """Return data, scale and group shape of an operand: a `Quantized`, or an array with a separate scale.

    Raises:
        ScaleError: a `Quantized` has a separate scale, too, or an array has none.
    """
    if isinstance(x, Quantized):
        if scale is not None:
            raise ScaleError(f"{scale_name} needs to be left out where {name} is a Quantized, got both")
        return x.data, x.scale, x.group_shape
    if scale is None and x is not None:  # what takes the operand refuses None
        raise ScaleError(f"{name} needs {scale_name} or to be a Quantized, as quantize returns it, got neither")
    return x, scale, None
