"""Arrays with shape and dtype but no memory: torch's meta and fake tensors, JAX's ShapeDtypeStruct and tracers."""

import sys
from numbers import Integral
from typing import Any, Final, NamedTuple

from fp8core.errors import ShapeError
from fp8core.interop.dlpack import contiguous
from fp8core.interop.names import dtype_name
from fp8core.interop.scalars import scalar

_MEMORY: Final = "__dlpack__", "__cuda_array_interface__", "__array_interface__"


class Memoryless(NamedTuple):
    """Dtype, shape and strides (in elements) of an array without memory."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def without_memory(x: Any, name: str) -> Memoryless | None:
    """Return dtype, shape and strides of an array without memory; None if ``x`` has memory, or is not an array.

    Anything that has a shape and a dtype, and exports no memory, counts as such an array: ``jax.ShapeDtypeStruct``
    does.

    Raises:
        DTypeError: the dtype is not in `dtypes.ITEMSIZE`.
        ShapeError: an extent is a symbol, not a number, or is negative.
    """
    strides = _strides(x)
    if strides is None:
        return None
    shape = tuple(x.shape)
    if not all(isinstance(number, Integral) for number in (*shape, *strides)) or any(extent < 0 for extent in shape):
        raise ShapeError(f"{name} needs extents that are numbers of at least 0, got shape {shape}")
    extents = tuple(map(int, shape))  # also of numbers of NumPy
    return Memoryless(dtype_name(x.dtype, name), extents, strides or contiguous(extents))


def _strides(x: Any) -> tuple[int, ...] | None:
    """Return the strides of an array without memory, ``()`` if they are row-major; None if ``x`` is no such array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        fakes = sys.modules.get("torch._subclasses.fake_tensor")
        return tuple(x.stride()) if x.is_meta or (fakes is not None and isinstance(x, fakes.FakeTensor)) else None
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        return ()
    if any(hasattr(x, offer) for offer in _MEMORY):
        return None
    return () if hasattr(x, "shape") and hasattr(x, "dtype") and scalar(x) is None else None
