"""The operands of a grouped product, and the checks that they fit together before anything is launched."""

from typing import Any, Final, NamedTuple

from fp8core.core import scale_shapes, specs
from fp8core.core.product import Product, product_of
from fp8core.core.specs import TensorSpec
from fp8core.dtypes import HIGH_PRECISION
from fp8core.errors import DTypeError, LayoutError, ShapeError
from fp8core.interop import dtype_name
from fp8core.interop.dlpack import contiguous
from fp8core.problem import GroupedMm, GroupShape

OFFSETS: Final = "int32"
"""The dtype of the ends of the groups."""


class GroupedProduct(NamedTuple):
    """The checked operands of a grouped product."""

    groups: int
    product: Product
    """The product of all rows of a with the weight of the first group."""
    weight_stride: int
    scale_stride: int
    bias_stride: int

    def problem(self, use_fast_accum: bool, out: TensorSpec | None) -> GroupedMm:
        """Return the problem with the result in ``out``, or in memory yet to be allocated."""
        product, strides = self.product, (self.weight_stride, self.scale_stride, self.bias_stride)
        problem = product.problem(use_fast_accum, False, out)
        bias_bytes = 0 if product.bias is None else self.bias_stride * product.bias.itemsize
        scale_bytes = self.scale_stride * product.scale_b.itemsize
        codes = specs.alignment(problem.codes_alignment, self.weight_stride)
        vectors = specs.alignment(problem.vectors_alignment, scale_bytes, bias_bytes)
        alignment = min(codes, problem.out_alignment)
        one = problem._replace(alignment=alignment, codes_alignment=codes, vectors_alignment=vectors)
        return GroupedMm(self.groups, one, *strides)


def grouped_product_of(
    a: TensorSpec,
    weight: TensorSpec,
    scale_a: TensorSpec,
    scale_b: TensorSpec,
    bias: TensorSpec | None,
    offs: TensorSpec,
    out_dtype: Any,
    group_a: GroupShape | None = None,
    group_b: GroupShape | None = None,
) -> GroupedProduct:
    """Return the operands of a grouped product after checking that they fit together.

    Args:
        a: FP8 ``[rows, k]``.
        weight: FP8 ``[groups, n, k]``.
        scale_a: the scale of a.
        scale_b: the scale of the weight, with an axis for the groups unless it is one number.
        bias: ``[groups, n]``.
        offs: int32 ``[groups]``.
        out_dtype: the dtype of the result, in high precision.
        group_a: the group shape of a if it is known.
        group_b: the group shape of the weight if it is known.
    """
    dtype_name(out_dtype, "out_dtype", HIGH_PRECISION)
    if len(a.shape) != 2:
        raise ShapeError(f"{a.name} needs two axes [rows, k], got shape {a.shape}")
    if len(weight.shape) != 3:
        raise ShapeError(f"{weight.name} needs three axes [groups, n, k], got shape {weight.shape}")
    groups, n, _ = weight.shape
    check_offsets(offs.dtype, offs.shape, groups)
    specs.contiguous_count(offs)
    if bias is not None and bias.shape != (groups, n):
        raise ShapeError(f"{bias.name} needs shape ({groups}, {n}), one row per group, got {bias.shape}")
    if not scale_shapes.is_one_number(scale_b.shape) and scale_b.shape[:1] != (groups,):
        wanted = f"one number, or {groups} groups along its first axis, as {weight.name}{weight.shape} has"
        raise ShapeError(f"{scale_b.name} needs {wanted}, got shape {scale_b.shape}")
    weight_stride = stride_of_groups(weight)
    if weight_stride < 0:
        raise LayoutError(f"{weight.name} needs groups in ascending order, got strides {weight.strides} (elements)")
    of_all = len(scale_b.shape) < 3 and scale_shapes.is_one_number(scale_b.shape)
    product = product_of(
        *(a, one_of(weight), scale_a, scale_b if of_all else one_of(scale_b)),
        *(None if bias is None else one_of(bias), out_dtype),
        stored=True,
        group_a=group_a,
        group_b=group_b,
    )
    specs.check_same_device(a, offs)
    return GroupedProduct(groups, product, weight_stride, stride_of_groups(scale_b), stride_of_groups(bias))


def check_offsets(dtype: str, shape: tuple[int, ...], groups: int) -> None:
    """Refuse ends of groups that are not ``groups`` int32 numbers."""
    if dtype != OFFSETS:
        raise DTypeError(f"offs needs {OFFSETS}, got {dtype}")
    if shape != (groups,):
        how = ": offs[1:] leaves out the leading 0" if shape == (groups + 1,) else ""
        raise ShapeError(f"offs needs shape ({groups},), where each group of rows ends, got {shape}{how}")


def stride_of_groups(x: TensorSpec | None) -> int:
    """Return the elements from one group of an operand to the next; 0 without two groups that have elements."""
    return 0 if x is None or 0 in x.shape or x.shape[:1] in ((), (1,)) else x.strides[0]


def one_of(x: TensorSpec) -> TensorSpec:
    """Return what one group has of an operand whose first axis is that of the groups."""
    # The strides of an array without elements are arbitrary.
    strides = x.strides[1:] if x.shape[0] else contiguous(x.shape[1:])
    return x._replace(name=f"{x.name}[i]", shape=x.shape[1:], strides=strides)
