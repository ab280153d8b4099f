"""Names of operands, types and dtypes: a dtype of any framework becomes one string, such as ``float8_e4m3fn``."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

from fp8core.dtypes import ITEMSIZE
from fp8core.errors import DeviceError, DTypeError, LayoutError

_NAMES: Final = {name: name for name in ITEMSIZE}


class Operand(str):
    """The name of an operand in error messages, with the dtypes that the operand accepts."""

    __slots__ = ("takes",)
    takes: tuple[str, ...]

    def __new__(cls, name: str, *takes: str) -> Self:
        """Name an operand that takes arrays of these dtypes."""
        made = super().__new__(cls, name)
        made.takes = takes
        return made


class ScaleOperand(Operand):
    """The name of an operand that may also be a number."""

    __slots__ = ()


def type_name(x: object) -> str:
    """Return the name of an operand's type, for error messages."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


@contextmanager
def exported(x: object, name: str, wanted: str) -> Iterator[None]:
    """Name the operand ``x`` in whatever its producer raises: code of others, which may fail in any way.

    Raises:
        LayoutError: the producer failed; its error is the cause.
        DeviceError, MemoryError: as they are, since another array would not help.
    """
    try:
        yield
    except (DeviceError, MemoryError):
        raise
    except Exception as error:
        got = f"{type_name(x)}: {type(error).__name__}: {error}"
        raise LayoutError(f"{name} needs {wanted}, got {got}") from error


def function_name(x: object) -> str:
    """Return what stands where a function was needed, for error messages: arrays, also of a layer, are not printed."""
    if isinstance(x, type):
        return repr(x)
    module, name = getattr(x, "__module__", None), getattr(x, "__qualname__", None)
    return type_name(x) if name is None else f"{module}.{name}" if module else name  # methods of builtins have none


def dtype_name(dtype: Any, name: str = "dtype", among: Collection[str] = ITEMSIZE) -> str:
    """Return the name of a dtype.

    Args:
        dtype: its name, a NumPy or ml_dtypes dtype or scalar type, a ``torch.dtype``, or a dtype of JAX.
        name: the name of the argument in error messages.
        among: the accepted names.

    Raises:
        DTypeError: dtype is not a dtype, or its name is not in ``among``.
    """
    if isinstance(dtype, str):
        known = _NAMES.get(dtype)
    else:
        known = _NAMES.get(dtype_spelling(dtype))
        if getattr(dtype, "byteorder", "=") not in ("=", "|"):
            known = None
    if known is None or known not in among:
        got = dtype if known is None else known
        raise DTypeError(f"{name} needs one of {', '.join(among)}, or a framework's dtype of that name, got {got!r}")
    return known


def dtype_spelling(dtype: Any) -> str:
    """Return how a framework spells one of its dtypes, also one that fp8core has no use for; "" for other types."""
    if isinstance(dtype, type):
        return dtype.__name__ if dtype.__module__ in ("numpy", "ml_dtypes", "jax.numpy") else ""
    named = getattr(dtype, "name", None)  # of a numpy.dtype; str(torch.uint8) is "torch.uint8"
    return named if isinstance(named, str) else str(dtype).removeprefix("torch.")
