"""FP8 arrays for frameworks without the dtype, and the export that gives any bytes a dtype on their way out."""

from typing import Any, Final

from fp8core.errors import DTypeError, LayoutError
from fp8core.interop import dlpack
from fp8core.problem import FORMATS

DTYPES: Final = (*FORMATS, "float8_e8m0fnu")


class DLPackView:
    """A DLPack exporter of an array of unsigned integers (CuPy or NumPy) as an array of another dtype.

    Memory, shape, strides, the versions of the protocol, its streams and its deleter are the array's own affair;
    only the type code differs.

    Args:
        array: the integers, as wide as ``dtype`` is.
        dtype: the name of what they are.
    """

    __slots__ = ("_array", "_dtype")

    def __init__(self, array: Any, dtype: str) -> None:
        self._array = array
        self._dtype = dtype

    def __dlpack__(self, **options: Any) -> Any:
        """Return a capsule; ``options`` are those of the protocol: stream, max_version, dl_device, copy."""
        return dlpack.retag(self._array.__dlpack__(**options), self._dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, ordinal = self._array.__dlpack_device__()
        return int(kind), int(ordinal)


class Float8Array(DLPackView):
    """An array of FP8 numbers over CuPy bytes, for CuPy has no such dtype; also over NumPy bytes.

    Views of it (``q[rows]``, ``q.T``) share its memory. It exports itself by DLPack under its own dtype, so
    ``torch.from_dlpack(q)`` is a ``torch.float8_*`` tensor of the same memory; ``__cuda_array_interface__`` has
    no word for FP8 and is not offered.

    Args:
        codes: a uint8 array, one byte an element.
        dtype: "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz" or "float8_e8m0fnu".

    Raises:
        DTypeError: the codes are not bytes, or the dtype is another.

    Examples:
        >>> import numpy as np, fp8core
        >>> q = fp8core.Float8Array(np.array([[0x38, 0xB8]], np.uint8), "float8_e4m3fn")
        >>> q
        Float8Array(shape=(1, 2), dtype=float8_e4m3fn, strides=(2, 1), device=cpu)
        >>> q.get().astype(np.float32).tolist()
        [[1.0, -1.0]]
        >>> fp8core.dequantize(q, 2.0).tolist()
        [[2.0, -2.0]]
    """

    __slots__ = ()

    def __init__(self, codes: Any, dtype: str) -> None:
        if codes.dtype.char != "B":
            raise DTypeError(f"codes needs uint8, got {codes.dtype}")
        if dtype not in DTYPES:
            raise DTypeError(f"dtype needs one of {', '.join(DTYPES)}, got {dtype!r}")
        super().__init__(codes, dtype)

    @property
    def codes(self) -> Any:
        """The bytes, as the uint8 array (CuPy or NumPy) that holds them."""
        return self._array

    @property
    def dtype(self) -> str:
        """The name of the dtype."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents."""
        return tuple(self._array.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """The distances between neighbours along each axis, in elements, which are bytes."""
        return tuple(self._array.strides)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._array.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self._array.size)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements: one each."""
        return self.size

    @property
    def device(self) -> Any:
        """The device, as the array of bytes names it."""
        return self._array.device

    @property
    def T(self) -> "Float8Array":  # noqa: N802 - NumPy's name
        """The same memory with the axes in reverse order."""
        return Float8Array(self._array.T, self._dtype)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, key: Any) -> "Float8Array":
        part = self._array[key]
        if not hasattr(part, "__dlpack__"):
            raise LayoutError(f"[{key!r}] is one number of {self!r}: take a slice, or .get() the array first")
        return Float8Array(part, self._dtype)

    def reshape(self, *shape: Any) -> "Float8Array":
        """Return the elements in another shape, without a copy where the strides allow it."""
        return Float8Array(self._array.reshape(*shape), self._dtype)

    def view(self, dtype: Any) -> Any:
        """Return the same memory as another dtype of one byte: the bytes for "uint8", else a Float8Array."""
        name = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", str(dtype)))
        return self._array if name == "uint8" else Float8Array(self._array, name)

    def get(self) -> Any:
        """Return a NumPy array of the ``ml_dtypes`` dtype: a copy from the device, synchronised."""
        import ml_dtypes

        codes = self._array.get() if hasattr(self._array, "get") else self._array
        return codes.view(getattr(ml_dtypes, self._dtype))

    def __repr__(self) -> str:
        return f"Float8Array(shape={self.shape}, dtype={self._dtype}, strides={self.strides}, device={self.device})"
