"""Types of arguments, for type checkers and readers; calls do not use them.

Keyword arguments that several functions share are declared once, in the `TypedDict` classes below. The docstrings of
the functions explain them.
"""

from typing import TYPE_CHECKING, Any, Literal, Never, Protocol, TypeAlias, TypedDict, TypeVar

from fp8core.dtypes import Fp8Name
from fp8core.problem import ScaleFormat, ScaleLayout

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "ActivationName",
    "Array",
    "ArrayT",
    "CupyArray",
    "DType",
    "Fp8DType",
    "Fp8Name",
    "Number",
    "NumpyArray",
    "Scale",
    "ScaleFormat",
    "ScaleLayout",
    "Stream",
    "WideDType",
    "WideName",
]


class Array(Protocol):
    """An array of any framework that offers DLPack: NumPy, CuPy, torch, JAX, or a `Float8Array`.

    Examples:
        >>> import fp8core
        >>> from fp8core.types import Array
        >>> def encode(x: Array) -> object:
        ...     return fp8core.quantize(x).data
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent of each axis."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a capsule. JAX's stubs lack ``__dlpack_device__``, the protocol's other method."""


class CupyArray(Array, Protocol):
    """An array of CuPy, which has no FP8 dtype: FP8 results are `Float8Array`."""

    @property
    def __cuda_array_interface__(self) -> Any:
        """The memory on the GPU."""

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy in host memory."""


class Untyped(Protocol):
    """Matches only arguments of unknown type, as CuPy's arrays are to checkers, which then infer `Any` as result."""

    _of_unknown_type: Never


if TYPE_CHECKING:
    NumpyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
    """A NumPy array of any shape and dtype."""
    Number: TypeAlias = float | np.floating[Any] | np.integer[Any]
    """A number of Python or NumPy."""
else:  # NumPy is not imported for its types alone
    NumpyArray, Number = Array, float

ArrayT = TypeVar("ArrayT", bound=Array)
"""The array type of a framework that has one type for arrays of all dtypes: torch, JAX."""
CupyT = TypeVar("CupyT", bound=CupyArray)
DataT_co = TypeVar("DataT_co", covariant=True)
"""The type of FP8 data."""
ArrayT_co = TypeVar("ArrayT_co", covariant=True)
"""The type of all other arrays of the framework."""

Scale: TypeAlias = Array | Number
"""An array of scales, or one number."""

WideName = Literal["float32", "float16", "bfloat16"]
ActivationName = Literal["gelu", "gelu_tanh", "silu"]
SchemeName = Literal["channel", "tensor", "block", "static", "mxfp8"]
"""The schemes by which a checkpoint can be quantized."""
ConversionName = Literal[
    "bf16",
    "channel",
    "block",
    "tensor",
    "mxfp8",
    "deepseek",
    "compressed-tensors",
    "modelopt",
    "modelopt-mxfp8",
    "comfyui",
]
"""The formats that an FP8 checkpoint can be converted to."""


class _DTypeObject(Protocol):
    @property
    def itemsize(self) -> int: ...


DTypeObject: TypeAlias = type[Any] | _DTypeObject
"""A dtype of NumPy, ml_dtypes, torch or JAX."""
Fp8DType: TypeAlias = Fp8Name | DTypeObject
WideDType: TypeAlias = WideName | DTypeObject
DType: TypeAlias = Fp8Name | WideName | DTypeObject


class _CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...


class _CupyStream(Protocol):
    @property
    def ptr(self) -> int: ...


class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...


Stream: TypeAlias = int | _CudaStream | _CupyStream | _TorchStream
"""A stream's address, or an object with ``__cuda_stream__``, ``.ptr`` (CuPy) or ``.cuda_stream`` (torch)."""


class StreamKeyword(TypedDict, total=False):
    """Keyword arguments of all functions."""

    stream: Stream | None


class ScalingKeywords(StreamKeyword, total=False):
    """Keyword arguments of all functions that quantize."""

    dtype: Fp8DType
    group_shape: tuple[int, int]
    scale: Scale | None
    scale_ub: Scale | None
    scale_format: ScaleFormat
    scale_layout: ScaleLayout
    eps: float
    out: Array | tuple[Array | None, Array | None] | None


class QuantizeKeywords(ScalingKeywords, total=False):
    """Keyword arguments of `fp8core.quantize`."""

    rows_padded: int | None


class SiluKeywords(ScalingKeywords, total=False):
    """Keyword arguments of `fp8core.silu_and_mul_quant`."""

    round_intermediate: bool


class NormKeywords(SiluKeywords, total=False):
    """Keyword arguments of `fp8core.rms_norm_quant`."""

    residual: Array | None


class DequantizeKeywords(StreamKeyword, total=False):
    """Keyword arguments of `fp8core.dequantize`."""

    group_shape: tuple[int, int] | None
    dtype: WideDType
    out: Array | None


class CallKeywords(StreamKeyword, total=False):
    """Keyword arguments of calls of an `fp8core.Fp8Linear`, and of functions on weights."""

    out: Array | None


class SharedProductKeywords(CallKeywords, total=False):
    """Keyword arguments of all functions with a product."""

    bias: Array | None
    activation: ActivationName | None
    use_fast_accum: bool
    batch_invariant: bool


class ProductKeywords(SharedProductKeywords, total=False):
    """Keyword arguments of `fp8core.scaled_mm` and `fp8core.scaled_mm_nt`."""

    out_dtype: DType
    out_scale: Scale | None
    amax: Array | None
    beta: float


class GroupedKeywords(CallKeywords, total=False):
    """Keyword arguments of `fp8core.grouped_scaled_mm_nt` beside ``offs``."""

    bias: Array | None
    out_dtype: WideDType
    use_fast_accum: bool


class UnpermuteKeywords(CallKeywords, total=False):
    """Keyword arguments of `fp8core.moe_unpermute`."""

    out_dtype: WideDType | None


class LinearKeywords(SharedProductKeywords, total=False):
    """Keyword arguments of `fp8core.linear`."""

    input_scale: Scale | None
    group_shape: tuple[int, int]
    scale_ub: Scale | None
    out_dtype: WideDType | None
