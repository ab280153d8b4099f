"""Problems as plain values: hashable, printable, comparable, made without a device.

A problem is a named tuple. So a table's dictionary of plans can be looked up with the plain tuple of its fields, which
takes half the time to build; `Table.plan` turns it into the named tuple on a miss.
"""

from typing import Final, Literal, NamedTuple

from fp8core.target import Target

ScaleFormat = Literal["float32", "ue8m0", "ue8m0_bytes"]
ScaleLayout = Literal["k", "mn"]
Granularity = Literal["tensor", "row", "group", "block"]
Activation = Literal["", "gelu", "gelu_tanh", "silu"]


class GroupShape(NamedTuple):
    """The (rows, columns) of elements that share one scale; -1 spans the whole axis. A plain pair works as well.

    PER_TENSOR is (-1, -1), PER_TOKEN and PER_CHANNEL (1, -1), GROUP_128 (1, 128) and BLOCK_128 (128, 128).

    Examples:
        >>> import fp8core
        >>> fp8core.BLOCK_128
        GroupShape(rows=128, cols=128)
        >>> fp8core.BLOCK_128.scale_shape(512, 200)
        (4, 2)
    """

    rows: int
    cols: int

    def scale_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the shape of the scales of a ``rows`` x ``cols`` matrix.

        Examples:
            >>> import fp8core
            >>> fp8core.PER_TOKEN.scale_shape(16, 4096)
            (16, 1)
        """
        return (1 if self.rows < 0 else -(-rows // self.rows), 1 if self.cols < 0 else -(-cols // self.cols))


PER_TENSOR: Final = GroupShape(-1, -1)
"""One scale for all elements."""
PER_TOKEN: Final = GroupShape(1, -1)
"""One scale per row: in activations ``[..., k]``, a row is a token."""
PER_CHANNEL: Final = PER_TOKEN
"""One scale per row: in a weight stored as ``[n, k]``, a row is an output channel."""
BLOCK: Final = 128
"""The group size of products: groups have this many elements of k, blocks this many rows and columns."""
GROUP_128: Final = GroupShape(1, BLOCK)
"""One scale for 128 consecutive elements of a row: activations of products with block scales."""
BLOCK_128: Final = GroupShape(BLOCK, BLOCK)
"""One scale for a block of 128 rows and 128 columns: weights of products with block scales."""


class Quantize(NamedTuple):
    """``data, scale = quantize(x)``, for any number of rows."""

    target: Target
    x: str
    data: str
    group_shape: GroupShape
    static: bool
    scale_format: ScaleFormat
    scale_layout: ScaleLayout
    cols: int
    alignment: int
    """The largest power of two, up to 16, that divides the addresses of the rows of x and, up to 8, those of data."""


class Dequantize(NamedTuple):
    """``out = q * scale``, for any number of rows; scale_format is "float32" or "ue8m0_bytes"."""

    target: Target
    q: str
    out: str
    group_shape: GroupShape
    scale_format: ScaleFormat
    cols: int
    alignment: int
    """The largest power of two, up to 16, that divides the addresses of the rows of out; rows of q are aligned to as
    many elements."""


class NormQuantize(NamedTuple):
    """``quantize(rms_norm(x [+ residual]) * weight)`` in one launch."""

    target: Target
    x: str
    weight: str
    data: str
    group_shape: GroupShape
    static: bool
    scale_format: ScaleFormat
    scale_layout: ScaleLayout
    residual: bool
    round_intermediate: bool
    cols: int
    alignment: int


class SiluQuantize(NamedTuple):
    """``quantize(silu(gate) * up)`` of ``x = [gate, up]`` in one launch; cols are those of the result."""

    target: Target
    x: str
    data: str
    group_shape: GroupShape
    static: bool
    scale_format: ScaleFormat
    scale_layout: ScaleLayout
    round_intermediate: bool
    cols: int
    alignment: int


class Requantize(NamedTuple):
    """A weight of ``shards`` fused shards, requantized to the largest of their scales."""

    target: Target
    dtype: str
    shards: int
    cols: int
    alignment: int


class Normalize(NamedTuple):
    """A weight converted to the other E4M3 with the same real values; ``dtype`` is the input's format."""

    target: Target
    dtype: str
    alignment: int


class AllClose(NamedTuple):
    """A test whether all scales of an array equal the first, for any number of scales."""

    target: Target


class Expand(NamedTuple):
    """One scale per shard, written once per row."""

    target: Target
    shards: int


class ScaledMm(NamedTuple):
    """``out = round(activation(scale_a * (scale_b * (a @ b)) + bias + beta * out))``.

    a is ``[m, k]``, b is stored ``[n, k]``, rows are contiguous.
    """

    target: Target
    m: int
    n: int
    k: int
    a: str
    b: str
    out: str
    scale_a: Granularity
    """"tensor", "row" (one per token) or "group" (1x128)."""
    scale_b: Granularity
    """"tensor", "row" (one per output channel), "group" (1x128) or "block" (128x128)."""
    scale_a_strides: tuple[int, int]
    """The strides of the scale as a matrix over (m, k blocks), in elements; 0 along a broadcast axis."""
    scale_b_strides: tuple[int, int]
    """The strides of the scale as a matrix over (n or n blocks, k blocks), in elements; 0 along a broadcast axis."""
    bias: str
    """The dtype of the bias, or "" without a bias."""
    out_scale: bool
    amax: bool
    use_fast_accum: bool
    batch_invariant: bool
    lda: int
    ldb: int
    ldo: int
    alignment: int
    """The largest power of two, up to 16, that divides the addresses of the rows of a, b and out."""
    vectors_alignment: int = 16
    """The same for the addresses of scale_a, scale_b, bias and amax."""
    prefetch_weight: bool = False
    """b, scale_b and bias may be read before `griddepcontrol.wait` (PDL): the kernels that wrote them had ended before
    the preceding kernel on the stream began."""
    scale_dtype: str = "float32"
    """The dtype of scale_a and scale_b."""
    codes_alignment: int = 1
    """Like `alignment`, but only for a, b and their rows; `alignment` holds for them, too, so the larger one counts."""
    out_alignment: int = 1
    """Like `alignment`, in bytes, but only for out and its rows; `alignment` holds for them, too, so the larger one
    counts."""
    scale_a_alignment: int = 1
    """Like `vectors_alignment`, but only for scale_a, which TMA may load; the larger one of both counts, likewise."""
    activation: Activation = ""
    beta: float = 0.0
    """The factor of the values of out before the call, which are added; with 0 they are not read."""


class GroupedMm(NamedTuple):
    """A product for each group of consecutive rows of a, with a weight of its own: the experts of a mixture.

    Where the groups end is only known on the device.
    """

    groups: int
    product: ScaledMm
    """The product of all rows, and the strides of one group; its alignments hold for every group."""
    weight_stride: int
    """The elements from the weight of one group to that of the next."""
    scale_stride: int
    """The same for the scales of the weight; 0 if all groups share one number."""
    bias_stride: int
    """The same for the bias."""

    @property
    def target(self) -> Target:
        """The device."""
        return self.product.target

    @property
    def m(self) -> int:
        """The rows of all groups."""
        return self.product.m

    @property
    def n(self) -> int:
        """The channels of each weight."""
        return self.product.n


class MoePermute(NamedTuple):
    """Rows of tokens, one for each choice of an expert, sorted by expert."""

    target: Target
    ids: str
    """The dtype of the chosen experts."""
    experts: int
    each: int
    """The choices of a token."""
    row_bytes: int
    """The bytes of a token's row."""
    scale_bytes: int
    """The bytes of a scale; 0 without scales."""
    alignment: int
    """The largest power of two, up to 16, that divides the addresses of all rows."""


class MoeUnpermute(NamedTuple):
    """The weighted sum of the rows of each token."""

    target: Target
    y: str
    weights: str
    """The dtype of the weights, or "" without weights."""
    out: str
    each: int
    """The choices of a token."""
    cols: int
    alignment: int
    """The largest power of two, up to 16, that divides the addresses of all rows, those of out as if it had the
    elements of y."""


class Linear(NamedTuple):
    """``out = scaled_mm(*quantize(x), weight, ...)``."""

    quantize: Quantize
    product: ScaledMm
    """The product of the quantized codes and scales with the weight."""
    x_stride: int
    """The elements from row to row of x."""
    scale_ub: float | None
    """The upper bound of amax per token, infinite if there is none; None if it is an array."""
