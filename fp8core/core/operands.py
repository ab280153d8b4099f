"""What the operations ask of an operand before anything is launched: two axes, an alignment, one device."""

import math
from typing import NamedTuple

from fp8core.errors import DeviceError, DTypeError, LayoutError, ShapeError
from fp8core.interop import TensorView
from fp8core.problem import FORMATS, ITEMSIZE, WIDE, GroupShape


class Matrix(NamedTuple):
    """A view folded to two axes; ``stride`` counts the elements from row to row."""

    rows: int
    cols: int
    stride: int


def matrix(view: TensorView, name: str) -> Matrix:
    """Return ``view`` with its leading axes folded into rows, which no copy may be needed for.

    Raises:
        ShapeError: the array has no axes.
        LayoutError: the last axis is not contiguous, a stride is negative, or the leading axes do not fold.
    """
    shape, strides = view.shape, view.strides
    if not shape:
        raise ShapeError(f"{name} needs at least one axis, got a 0-d array")
    cols = shape[-1]
    if 0 in shape:  # the strides of an array without elements say nothing
        return Matrix(math.prod(shape[:-1]), cols, cols)
    if cols > 1 and strides[-1] != 1:
        raise LayoutError(f"{name} needs a contiguous last axis, got shape {shape} with strides {strides} (elements)")
    if len(shape) == 2:
        rows, stride = shape[0], strides[0]
    else:
        rows, stride = _folded(shape[:-1], strides[:-1], cols, name)
    if rows <= 1:
        stride = cols
    if stride < 0:
        raise LayoutError(f"{name} needs rows in ascending order, got strides {strides} (elements)")
    return Matrix(rows, cols, stride)


def _folded(shape: tuple[int, ...], strides: tuple[int, ...], cols: int, name: str) -> tuple[int, int]:
    rows, stride = 1, cols
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if rows == 1:
            stride = step
        elif step != stride * rows:
            raise LayoutError(
                f"{name} needs leading axes that fold into rows without a copy, got shape {(*shape, cols)} "
                f"with strides {strides} (elements) of the leading axes"
            )
        rows *= size
    return rows, stride


def written(view: TensorView, name: str, shape: tuple[int, ...], dtype: str) -> Matrix:
    """Return an array of the caller that receives a result as a matrix, after checking that it can."""
    check_written(view, name, shape, dtype)
    folded = matrix(view, name)
    if folded.rows > 1 and folded.stride < folded.cols:
        raise LayoutError(f"{name} needs rows that do not overlap, got strides {view.strides} (elements)")
    return folded


def check_written(view: TensorView, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """Refuse an array (one viewed with ``written=True``) that cannot receive a result of this shape and dtype."""
    if view.dtype != dtype:
        raise DTypeError(f"{name} needs {dtype}, got {view.dtype}")
    if view.shape != shape:
        raise ShapeError(f"{name} needs shape {shape}, got {view.shape}")


def alignment(*multiples: int) -> int:
    """Return the largest power of two up to 16 that divides every number."""
    bits = 16
    for number in multiples:
        bits |= number
    return bits & -bits


def octets(x: TensorView, stride: int, data: int, data_stride: int) -> int:
    """Return the alignment of a quantization, whose kernels load eight elements at a time and store eight bytes."""
    size = ITEMSIZE[x.dtype]
    codes = data | data_stride
    return alignment(x.pointer, stride * size, codes if codes % 8 else 0)


def same_device(first: TensorView, name: str, **others: TensorView | None) -> None:
    """Refuse operands on different devices."""
    for other, view in others.items():
        if view is not None and view.target != first.target:
            raise DeviceError(f"{other} needs to be where {name} is, on {first.target}, got {view.target}")


def is_fp8(view: TensorView, name: str) -> None:
    """Refuse what is not one of the four FP8 formats."""
    if view.dtype not in FORMATS:
        raise DTypeError(f"{name} needs an FP8 dtype ({', '.join(FORMATS)}), got {view.dtype}")


def is_wide(view: TensorView, name: str) -> None:
    """Refuse what is not one of the formats that are quantized from."""
    if view.dtype not in WIDE:
        raise DTypeError(f"{name} needs {', '.join(WIDE)}, got {view.dtype}")


def wide_name(dtype: str, name: str) -> str:
    """Return ``dtype`` when it is one of the formats that results are given in."""
    if dtype not in WIDE:
        raise DTypeError(f"{name} needs {', '.join(WIDE)}, got {dtype}")
    return dtype


def fp8_name(dtype: str, name: str) -> str:
    """Return ``dtype`` when it is one of the four FP8 formats."""
    if dtype not in FORMATS:
        raise DTypeError(f"{name} needs one of {', '.join(FORMATS)}, got {dtype}")
    return dtype


def group(group_shape: tuple[int, int]) -> GroupShape:
    """Return a group shape, each side of which is a positive number or -1."""
    rows, cols = group_shape
    if not ((rows == -1 or rows > 0) and (cols == -1 or cols > 0)):
        raise ShapeError(f"group_shape needs two sides that are positive or -1, got {tuple(group_shape)}")
    return GroupShape(rows, cols)


def itemsize(view: TensorView) -> int:
    """Return the bytes of one element."""
    return ITEMSIZE[view.dtype]
