"""The launches of a linear layer: x is quantized into a scratch, which the product reads."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fp8core.core import specs
from fp8core.core.calls import Planned
from fp8core.core.scaling import ScaleOptions, Scaling, scaling
from fp8core.core.specs import Matrix, TensorSpec
from fp8core.interop import dlpack
from fp8core.kernels.encodings import round_up, scratch_part
from fp8core.kernels.linear.table import Steps
from fp8core.problem import GroupShape
from fp8core.runtime.plans import QuantizeNumbers
from fp8core.table import Launch

ROW_ALIGNMENT: Final = 16
"""The alignment of rows of codes in bytes; with it, kernels that need aligned rows run products of any k."""
COMPUTED: Final = "the scale of x"
"""The name, in error messages, of a scale that the caller did not give."""


def aligned_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of row-major codes whose rows are padded to a multiple of `ROW_ALIGNMENT`."""
    return dlpack.row_major((*shape[:-1], round_up(shape[-1], ROW_ALIGNMENT)))


class ScratchCodes(NamedTuple):
    """Codes and scales of x in a scratch: how they are computed, and their layout."""

    at: Matrix
    stride: int
    """The elements from row to row of the codes."""
    how: Scaling
    x: TensorSpec
    codes: TensorSpec
    scale: TensorSpec
    """The scale that the product reads: the given one, or that in the scratch."""
    scale_offset: int | None
    """The offset of the scales in the scratch, in bytes; None if the scale is given."""
    bytes: int


def codes_in_scratch(
    x: TensorSpec,
    dtype: str,
    group: GroupShape,
    input_scale: TensorSpec | None,
    upper: TensorSpec | None,
    bound: Any,
) -> ScratchCodes:
    """Check that x can be quantized to ``dtype``, and return how it is quantized into a scratch."""
    specs.check_high_precision(x)
    at = specs.matrix(x)
    given = input_scale is not None
    layout = "mn" if group.cols > 0 and not given else "k"  # the layout of groups that block-scaled products read
    asked = ScaleOptions(dtype, group, given, bound, "float32", layout)
    how = scaling(asked, x, x.shape, input_scale, upper)
    stride = round_up(at.cols, ROW_ALIGNMENT)
    codes = TensorSpec("x", dtype, x.shape, aligned_strides(x.shape), x.target)
    offset = scratch_part(at.rows * stride)
    if input_scale is not None:
        return ScratchCodes(at, stride, how, x, codes, input_scale, None, offset)
    scale = TensorSpec(COMPUTED, "float32", how.group_shape.scale_shape(at.rows, at.cols), how.strides, x.target)
    nbytes = scratch_part(4 * how.computed())
    return ScratchCodes(at, stride, how, x, codes, scale, offset, offset + nbytes)


def planned(steps_of: Callable[[bool], Steps], q: ScratchCodes | None) -> Planned:
    """Return the planned launches of a layer.

    Args:
        steps_of: returns the launches, given whether the product may read the weight early.
        q: how x is quantized; None if x is already quantized.
    """
    steps = steps_of(False)
    launch, nbytes = _launch(steps, q), _scratch_bytes(steps, q)

    def prefetching() -> Launch:
        early = steps_of(True)  # may have other kernels than `steps`, if it was tuned since
        return _launch(early, q) if _scratch_bytes(early, q) == nbytes else launch

    return Planned(launch, nbytes, prefetching if steps.product.prefetches_weight else None)


def _scratch_bytes(steps: Steps, q: ScratchCodes | None) -> int:
    """Return the bytes of a layer's scratch: those of codes and scales, if any, and those of the product."""
    return steps.product.scratch_bytes + (0 if steps.quantize is None or q is None else q.bytes)


def _launch(steps: Steps, q: ScratchCodes | None) -> Launch:
    """Return one function that makes all launches of a layer; codes and scales are at the start of the scratch."""
    multiply = steps.product
    if steps.quantize is None or q is None:

        def multiply_x(
            stream: int, x: int, weight: int, scale_b: int, bias: int, scale_a: int, _upper: int, out: int, scratch: int
        ) -> None:
            multiply(stream, x, weight, scale_a, scale_b, bias, out, 0, 0, scratch)

        return multiply_x

    given, scale_offset, behind = q.scale_offset is None, q.scale_offset or 0, q.bytes
    numbers = QuantizeNumbers(q.at.stride, q.stride, *q.how.strides, q.at.rows, q.at.rows, q.how.upper, q.how.eps)
    quantize = steps.quantize.bind(numbers)

    def run(
        stream: int, x: int, weight: int, scale_b: int, bias: int, scale_a: int, upper: int, out: int, scratch: int
    ) -> None:
        scale = scale_a if given else scratch + scale_offset
        quantize(stream, x, scratch, scale, upper)
        multiply(stream, scratch, weight, scale, scale_b, bias, out, 0, 0, scratch + behind)

    return run
