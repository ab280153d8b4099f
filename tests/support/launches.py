"""Launches that take all addresses and numbers in one list of arguments."""

from collections.abc import Callable
from typing import Any, Final

from fp8core.runtime.plans import (
    AllCloseNumbers,
    DequantizeNumbers,
    ExpandNumbers,
    MoePermuteNumbers,
    MoeUnpermuteNumbers,
    NormalizeNumbers,
    Plan,
    QuantizeNumbers,
    RequantizeNumbers,
    RmsNormNumbers,
    SiluNumbers,
)

_RESULT: Final = ("data", "data_stride", "scale", "scale_row_stride", "scale_col_stride", "rows")
_LIMITS: Final = ("upper", "upper_value", "eps")
ORDER: Final[dict[type, tuple[str, ...]]] = {
    QuantizeNumbers: ("x", "x_stride", *_RESULT, "rows_padded", *_LIMITS),
    DequantizeNumbers: ("q", "q_stride", *_RESULT[2:5], "out", "out_stride", "rows"),
    RmsNormNumbers: ("x", "x_stride", "residual", "residual_stride", "weight", "epsilon", *_RESULT, *_LIMITS),
    SiluNumbers: ("x", "x_stride", *_RESULT, *_LIMITS),
    RequantizeNumbers: (
        *("weight", "weight_stride", "scales", "scales_count", "widths"),
        *("out", "out_stride", "max_scale"),
    ),
    NormalizeNumbers: (
        *("weight", "out", "code_count", "scale", "scale_out", "scale_count"),
        *("input_scale", "input_scale_out", "input_scale_count"),
    ),
    AllCloseNumbers: ("x", "scale_count", "result"),
    ExpandNumbers: ("scales", "scales_count", "widths", "out"),
    MoePermuteNumbers: (
        *("x", "x_stride", "scale", "scale_cols", "scale_row_stride", "scale_col_stride", "topk_ids", "tokens"),
        *("rows", "row_scale", "row_scale_row_stride", "row_scale_col_stride", "offs", "inverse", "counts"),
    ),
    MoeUnpermuteNumbers: ("y", "y_stride", "rows", "inverse", "weights", "tokens", "out", "out_stride"),
}
"""By kind of numbers: the names of the arguments of `whole`, in order."""
ADDRESSES: Final[dict[type, tuple[str, ...]]] = {
    kind: tuple(name for name in order if name not in getattr(kind, "_fields"))  # noqa: B009
    for kind, order in ORDER.items()
} | {RmsNormNumbers: ("x", "weight", "residual", "data", "scale", "upper")}
"""By kind of numbers: the names of the addresses that a bound launch takes after the stream."""


def whole(plan: Plan) -> Callable[..., None]:
    """Return a function that launches ``plan``, given the stream and all operands in the order of `ORDER`."""

    def launch(stream: int, *operands: Any) -> None:
        given = dict(zip(ORDER[plan.kind], operands, strict=True))
        numbers = plan.kind(*(given.pop(name) for name in plan.kind._fields))
        plan.bind(numbers)(stream, *(given[name] for name in ADDRESSES[plan.kind]))

    return launch
