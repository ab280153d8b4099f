"""The operands of a grouped product, and the checks that they fit together before anything is launched."""

from typing import Any, Final, NamedTuple

from fp8core.core import scale_shapes, specs
from fp8core.core.product import Product, product_of
from fp8core.core.specs import TensorSpec
from fp8core.errors import DTypeError, LayoutError, ShapeError
from fp8core.interop import dtype_name
from fp8core.interop.dlpack import contiguous
from fp8core.problem import HIGH_PRECISION, ITEMSIZE, GroupedMm, GroupShape

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
        bias_bytes = self.bias_stride * ITEMSIZE[product.bias.dtype] if product.bias is not None else 0
        scale_bytes = self.scale_stride * ITEMSIZE[product.scale_b.dtype]
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
    groups, n, k = weight.shape
    check_offsets(offs.dtype, offs.shape, groups)
    specs.contiguous_count(offs)
    if bias is not None and bias.shape != (groups, n):
        raise ShapeError(f"{bias.name} needs shape ({groups}, {n}), one row per group, got {bias.shape}")
    if not scale_shapes.is_one_number(scale_b.shape) and scale_b.shape[:1] != (groups,):
        wanted = f"one number, or {groups} groups along its first axis, as {weight.name}{weight.shape} has"
        raise ShapeError(f"{scale_b.name} needs {wanted}, got shape {scale_b.shape}")
    weight_stride = weight.strides[0] if groups > 1 and n and k else 0
    if weight_stride < 0:
        raise LayoutError(f"{weight.name} needs groups in ascending order, got strides {weight.strides} (elements)")
    scale_of_one, scale_stride = scale_b, 0
    if len(scale_b.shape) > 2 or not scale_shapes.is_one_number(scale_b.shape):
        scale_of_one, scale_stride = one_of(scale_b), scale_b.strides[0] if scale_b.shape[0] > 1 else 0
    product = product_of(
        *(a, one_of(weight), scale_a, scale_of_one, None if bias is None else one_of(bias), out_dtype),
        stored=True,
        group_a=group_a,
        group_b=group_b,
    )
    specs.check_same_device(a, offs)
    bias_stride = bias.strides[0] if bias is not None and groups > 1 else 0
    return GroupedProduct(groups, product, weight_stride, scale_stride, bias_stride)


def check_offsets(dtype: str, shape: tuple[int, ...], groups: int) -> None:
    """Refuse ends of groups that are not ``groups`` int32 numbers."""
    if dtype != OFFSETS:
        raise DTypeError(f"offs needs {OFFSETS}, got {dtype}")
    if shape != (groups,):
        how = ": offs[1:] leaves out the leading 0" if shape == (groups + 1,) else ""
        raise ShapeError(f"offs needs shape ({groups},), where each group of rows ends, got {shape}{how}")


def one_of(x: TensorSpec) -> TensorSpec:
    """Return what one group has of an operand whose first axis is that of the groups."""
    # The strides of an array without elements are arbitrary.
    strides = x.strides[1:] if x.shape[0] else contiguous(x.shape[1:])
    return x._replace(name=f"{x.name}[i]", shape=x.shape[1:], strides=strides)
