"""FP8 arrays for frameworks without the dtype, and a DLPack export that gives bytes another dtype."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from fp8core.dtypes import FORMATS
from fp8core.errors import DTypeError, LayoutError
from fp8core.interop import dlpack
from fp8core.interop.float8_values import code_of, equal
from fp8core.interop.frameworks import framework_of
from fp8core.interop.names import Operand, dtype_name, type_name
from fp8core.interop.scalars import scalar
from fp8core.runtime import device

if TYPE_CHECKING:
    import numpy as np

DTYPES: Final = (*FORMATS, "float8_e8m0fnu")
_KNOWN: Final[set[type]] = set()
"""Array types of NumPy and CuPy seen so far."""
CODES: Final = Operand("codes", "uint8")
SHOWN: Final = 36
"""The repr of an array with more elements than this shows only the first and last three of each axis."""


class DLPackView:
    """A DLPack exporter of an array of unsigned integers (CuPy or NumPy) as an array of another dtype.

    Memory, shape, strides, protocol versions, streams and the deleter come from the array; only the type code differs.

    Args:
        array: an array of unsigned integers as wide as ``dtype``.
        dtype: the name of the dtype to export.
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
    """An array of FP8 numbers over the bytes of a CuPy array, as CuPy has no FP8 dtype; also over NumPy bytes.

    Views of it (``q[rows]``, ``q.T``) share its memory. DLPack exports it under its own dtype, so
    ``torch.from_dlpack(q)`` is a ``torch.float8_*`` tensor over the same memory; it has no
    ``__cuda_array_interface__``, which cannot express FP8. Over NumPy bytes, ``np.asarray(q)`` is the same memory with
    the dtype of ``ml_dtypes``. Memory of a GPU is never copied to the host implicitly: call `get`. ``jnp.asarray(q)``
    makes a ``jax.Array``.

    ``q == other`` compares values element by element with a number or another array of its dtype, as NumPy does: NaN
    equals nothing, and -0 equals 0; ``value in q`` tells whether any element is equal. There is no ``astype``:
    `fp8core.dequantize` converts, and also takes the scale.

    Args:
        codes: a uint8 array of NumPy or CuPy, one byte per element. Arrays of other libraries without FP8, such as
            numba and cuda.core, are taken too: their memory becomes a CuPy array, or a NumPy array on the host, without
            a copy.
        dtype: "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz" or "float8_e8m0fnu", as a name or
            as a dtype of any framework.

    Raises:
        DTypeError: the codes are not uint8, or the dtype is not one of these.
        LayoutError: the codes have no memory of their own, such as a tracer of JAX or a fake tensor of torch; or they
            are a masked array.
        DeviceError: they are neither on the host nor on a GPU.

    Examples:
        >>> import numpy as np, fp8core
        >>> q = fp8core.Float8Array(np.array([[0x38, 0xB8]], np.uint8), "float8_e4m3fn")
        >>> q
        Float8Array([[1, -1]],
                    shape=(1, 2), dtype=float8_e4m3fn, strides=(2, 1), device=cpu)
        >>> q.tolist(), (q == 1).tolist(), np.asarray(q).dtype.name
        ([[1.0, -1.0]], [[True, False]], 'float8_e4m3fn')
        >>> fp8core.dequantize(q, 2.0).tolist()
        [[2.0, -2.0]]
    """

    __slots__ = ("__weakref__",)

    def __init__(self, codes: Any, dtype: Any) -> None:
        if type(codes) not in _KNOWN:
            codes = _own(codes)
        if codes.dtype.char != "B":
            raise DTypeError(f"codes needs uint8, got {codes.dtype}")
        super().__init__(codes, dtype if type(dtype) is str and dtype in DTYPES else dtype_name(dtype, "dtype", DTYPES))

    @property
    def codes(self) -> Any:
        """The uint8 array (CuPy or NumPy) that holds the bytes."""
        return self._array

    @property
    def dtype(self) -> str:
        """The name of the dtype."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent of each axis."""
        return tuple(self._array.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """The stride of each axis in elements; an element is one byte."""
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
        """The number of bytes of all elements: one per element."""
        return self.size

    @property
    def itemsize(self) -> int:
        """The number of bytes of an element: 1."""
        return 1

    @property
    def device(self) -> Any:
        """The device of the array of bytes."""
        return self._array.device

    @property
    def T(self) -> "Float8Array":  # noqa: N802 - NumPy's name
        """The same memory with the axes in reverse order."""
        return Float8Array(self._array.T, self._dtype)

    @property
    def _on_gpu(self) -> bool:
        """Whether the bytes are an array of CuPy, which copies them to the host with ``get``, and not of NumPy."""
        return hasattr(self._array, "get")

    def __len__(self) -> int:
        return len(self._array)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the bytes; without this method, protocols 0 and 1 refuse the class for its slots."""
        return type(self), (self._array, self._dtype)

    def __getitem__(self, key: Any) -> "Float8Array":
        part = self._array[key]
        if not hasattr(part, "__dlpack__"):
            raise LayoutError(f"[{key!r}] is one number of {self._form()}: take a slice, or .get() the array first")
        return Float8Array(part, self._dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the values as a NumPy array, over the same memory unless ``dtype`` or ``copy`` require a copy.

        Raises:
            TypeError: the bytes are on a GPU.
        """
        if self._on_gpu:
            raise TypeError(f"NumPy needs an array in host memory, got {self._form()}: call .get()")
        import numpy as np

        return np.array(self.get(), dtype, copy=copy)

    def __jax_array__(self) -> Any:
        """Return the values as a ``jax.Array``, over the same memory unless JAX has to copy it.

        JAX calls this in ``jnp.asarray`` and wherever its functions take an array, but not for arguments of `jax.jit`.
        """
        if not self._on_gpu:
            return sys.modules["jax"].numpy.asarray(self.get())
        from fp8core.interop import jax_arrays

        return jax_arrays.framework().lend(self._array, self._dtype)

    def __eq__(self, other: object) -> Any:
        """Compare values element by element; return an array of bool. NaN equals nothing."""
        if isinstance(other, Float8Array):
            if other._dtype != self._dtype or other._on_gpu != self._on_gpu:
                return NotImplemented
            return equal(self._array, other._array, self._dtype)
        number = scalar(other)
        if number is None:
            return NotImplemented
        code = code_of(number, self._dtype) if number == other else None  # the float of 10**400 is infinity
        return self._array != self._array if code is None else equal(self._array, code, self._dtype)

    def __ne__(self, other: object) -> Any:
        """Compare values element by element; return an array of bool. NaN differs from everything."""
        same = self.__eq__(other)
        return same if same is NotImplemented else ~same

    def __contains__(self, value: object) -> bool:
        """Return whether ``self == value`` holds for any element, as NumPy does. Waits for a GPU."""
        same = self == value
        return bool(same.any()) if hasattr(same, "any") else same

    def __bool__(self) -> bool:
        """Return whether the only element is not 0; raise ValueError if there is another number of them, as NumPy."""
        if self.size != 1:
            raise ValueError(
                f"the truth value of {self.size} elements is ambiguous: compare them, and take any() or all()"
            )
        return self.item() != 0

    def __iter__(self) -> Iterator["Float8Array"]:
        """Return an iterator over the parts along the first axis; raise TypeError if there is no axis."""
        return map(self.__getitem__, range(len(self)))

    __hash__ = None  # type: ignore[assignment]  # unhashable, as == compares elements

    def reshape(self, *shape: Any) -> "Float8Array":
        """Return the elements in another shape, without a copy if the strides allow it."""
        return Float8Array(self._array.reshape(*shape), self._dtype)

    def view(self, dtype: Any) -> Any:
        """Return the same memory as another one-byte dtype: the bytes for "uint8", otherwise a Float8Array."""
        name = dtype_name(dtype, "dtype", ("uint8", *DTYPES))
        return self._array if name == "uint8" else Float8Array(self._array, name)

    def copy(self) -> "Float8Array":
        """Return a copy in row-major order, on the same device."""
        return Float8Array(self._array.copy(), self._dtype)

    def get(self) -> "np.ndarray[Any, np.dtype[Any]]":
        """Return a NumPy array of the ``ml_dtypes`` dtype; from a GPU this is a copy, which the call waits for."""
        import ml_dtypes

        codes = self._array.get() if self._on_gpu else self._array
        values: np.ndarray[Any, np.dtype[Any]] = codes.view(getattr(ml_dtypes, self._dtype))
        return values

    def tolist(self) -> Any:
        """Return the values as nested lists of Python floats, after `get`."""
        return self.get().tolist()

    def item(self, *index: Any) -> float:
        """Return one value as a Python float, with the arguments of NumPy's ``item``. Waits as `get` does.

        Args:
            *index: nothing, for the only value; its position in row-major order; or an index along each axis, also as a
                tuple.

        Raises:
            IndexError, TypeError, ValueError: as NumPy's ``item`` does.
        """
        if not index:
            return float(self.get().item())
        import numpy as np

        at = index[0] if isinstance(index[0], tuple) else index
        np.broadcast_to(np.uint8(0), self.shape).item(*index)  # raises what NumPy raises; an array without memory
        if len(at) == 1:
            at = np.unravel_index(at[0] % self.size, self.shape)
        axes = zip(at, self.shape, strict=True)
        one = self._array[tuple([slice(i % extent, i % extent + 1) for i, extent in axes])] if at else self._array
        return float(Float8Array(one, self._dtype).get().item())

    def __repr__(self) -> str:
        """Return shape, dtype, strides and device; for an array in host memory also its values, abridged.

        Values on a GPU are not shown: reading them would wait for the GPU, and invalidate a graph capture.
        """
        if self._on_gpu:
            return self._form()
        import numpy as np

        prefix = "Float8Array("
        values = np.array2string(self.get(), separator=", ", prefix=prefix, threshold=SHOWN, edgeitems=3)
        return f"{prefix}{values},\n{' ' * len(prefix)}{self._form().removeprefix(prefix)}"

    def _form(self) -> str:
        return f"Float8Array(shape={self.shape}, dtype={self._dtype}, strides={self.strides}, device={self.device})"


def _own(codes: Any) -> Any:
    """Return an array of NumPy or CuPy over the same memory; CuPy's current stream waits until it can be used."""
    from fp8core.interop import cuda_array

    framework = framework_of(type(codes))
    if framework is None:
        raise DTypeError(f"codes needs an array of uint8, got {type_name(codes)}")
    if framework is cuda_array.framework():
        return cuda_array.as_cupy(codes)
    dtype = framework.view(codes, CODES).dtype
    if dtype != "uint8":  # NumPy would not name the dtype that it refuses
        raise DTypeError(f"codes needs uint8, got {dtype}")
    if framework.name in ("numpy", "cupy"):
        _KNOWN.add(type(codes))
        return codes
    if codes.__dlpack_device__()[0] in dlpack.HOST_DEVICES:
        import numpy as np

        return np.from_dlpack(codes)
    return device.cupy().from_dlpack(codes)
