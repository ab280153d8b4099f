"""Plans: bind the numbers of a problem once; each launch then takes a stream and addresses."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from fp8core.runtime import args
from fp8core.table import Launch


class QuantizeNumbers(NamedTuple):
    """The numbers of `fp8core.quantize`. Launch: ``launch(stream, x, data, scale, upper)``. Strides are in elements."""

    x_stride: int
    data_stride: int
    scale_row_stride: int
    scale_col_stride: int
    rows: int
    rows_padded: int
    upper_value: float
    eps: float


class DequantizeNumbers(NamedTuple):
    """The numbers of `fp8core.dequantize`. Launch: ``launch(stream, q, scale, out)``."""

    q_stride: int
    scale_row_stride: int
    scale_col_stride: int
    out_stride: int
    rows: int


class RmsNormNumbers(NamedTuple):
    """The numbers of `fp8core.rms_norm_quant`. Launch: ``launch(stream, x, weight, residual, data, scale, upper)``."""

    residual_stride: int
    x_stride: int
    epsilon: float
    data_stride: int
    scale_row_stride: int
    scale_col_stride: int
    rows: int
    upper_value: float
    eps: float


class SiluNumbers(NamedTuple):
    """The numbers of `fp8core.silu_and_mul_quant`. Launch: ``launch(stream, x, data, scale, upper)``."""

    x_stride: int
    data_stride: int
    scale_row_stride: int
    scale_col_stride: int
    rows: int
    upper_value: float
    eps: float


class RequantizeNumbers(NamedTuple):
    """The numbers of `fp8core.requantize_with_max_scale`.

    Launch: ``launch(stream, weight, scales, out, max_scale)``.
    """

    weight_stride: int
    scales_count: int
    widths: tuple[int, ...]
    """The number of rows of each shard."""
    out_stride: int


class NormalizeNumbers(NamedTuple):
    """The numbers of `fp8core.normalize_e4m3fn_to_e4m3fnuz` and its inverse.

    Launch: ``launch(stream, weight, out, scale, scale_out, input_scale, input_scale_out)``. A number of scales may be
    0; their addresses are then 0, too.
    """

    code_count: int
    scale_count: int
    input_scale_count: int


class AllCloseNumbers(NamedTuple):
    """The numbers of `fp8core.all_close_1d`. Launch: ``launch(stream, x, result)``; the result is one int32."""

    scale_count: int


class ExpandNumbers(NamedTuple):
    """The numbers of `fp8core.convert_to_channelwise`. Launch: ``launch(stream, scales, out)``."""

    scales_count: int
    widths: tuple[int, ...]


class MoePermuteNumbers(NamedTuple):
    """The numbers of `fp8core.moe_permute`.

    Launch: ``launch(stream, x, scale, topk_ids, rows, row_scale, offs, inverse, counts)``, the last one a scratch.
    Strides are in elements, but for ``x_stride``, in bytes.
    """

    tokens: int
    x_stride: int
    scale_cols: int
    scale_row_stride: int
    scale_col_stride: int
    row_scale_row_stride: int
    row_scale_col_stride: int


class MoeUnpermuteNumbers(NamedTuple):
    """The numbers of `fp8core.moe_unpermute`. Launch: ``launch(stream, y, inverse, weights, out)``."""

    tokens: int
    rows: int
    """The rows of y."""
    y_stride: int
    out_stride: int


N = TypeVar("N", bound=tuple[Any, ...])
A = TypeVar("A", bound=tuple[Any, ...])


class Plan(Generic[N]):
    """The plan of a problem; ``bind`` returns the launch for given numbers."""

    def __init__(self, kind: type[N], bind: Callable[[N], Launch]) -> None:
        self.kind, self.bind = kind, bind


def arguments(kind: type[A], numbers: Any, **others: Any) -> A:
    """Return a kernel's arguments, of type ``kind``, from the fields of ``numbers`` and ``others``; addresses are 0."""
    given = {**numbers._asdict(), **others}
    fields = args.fields(kind).items()
    values: list[Any] = [given[name] if item[-1] not in args.VARYING else 0 for name, item in fields]
    return kind(*values)


def nothing(_stream: int, *_addresses: int) -> None:
    """Do nothing: the launch of a problem without elements."""
