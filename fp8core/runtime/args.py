"""A kernel's parameters, declared once: a named tuple whose annotations say how each one travels.

    class DequantizeArgs(NamedTuple):
        q: Pointer
        q_stride: Int64
        ...

Its fields have the names and the order of the parameters of the device source, which a test compares
(``tests/runtime/test_args.py``). A field can be another such named tuple, whose fields then stand in its place: what
several kernels take is declared once. From it follow the layout of a launch's memory and what a launch is called with.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final, get_args, get_type_hints

from fp8core.errors import UnsupportedProblemError

Pointer = Annotated[int, "P"]
"""The address of device memory: the only kind of parameter that differs from launch to launch of a bound kernel."""
Int32 = Annotated[int, "i"]
Int64 = Annotated[int, "q"]
Float32 = Annotated[float, "f"]
Int32Array = Annotated[tuple[int, ...], "*i"]
"""An array by value; how many it holds is an extent given to `items`."""
TensorMap = Annotated[bytes, "128s"]
"""A CUtensorMap by value; like an address it differs from launch to launch."""

PhasedMaps = Annotated[bytes, "2112s"]
"""Sixteen of these and as many numbers of 4 bytes, by value."""

VARYING: Final = "Ps"
"""The last letters of what a launch gives; all else is a number that a bound kernel keeps."""


def items(args: type, **extents: int) -> tuple[str, ...]:
    """Return the `struct` item of each field of the named tuple ``args``.

    Args:
        args: the declaration.
        **extents: how many numbers each `Int32Array` holds, by the field's name.
    """
    return tuple(item.replace("*", str(extents.get(name, ""))) for name, item in fields(args).items())


_FIELDS: Final[dict[type, dict[str, str]]] = {}


def fields(args: type) -> dict[str, str]:
    """Return the `struct` item of each field by its name, "*i" for an array."""
    if args not in _FIELDS:
        found: dict[str, str] = {}
        for name, hint in get_type_hints(args, include_extras=True).items():
            found.update(fields(hint) if isinstance(hint, type) else {name: get_args(hint)[1]})
        _FIELDS[args] = found
    return _FIELDS[args]


def numbers(args: Any) -> tuple[Any, ...]:
    """Return the values of an instance that do not vary from launch to launch, arrays flattened, in their order.

    Raises:
        UnsupportedProblemError: an extent is too large for kernels, which count it in 32 bits.
    """
    found: list[Any] = []
    for (name, item), value in zip(fields(type(args)).items(), values(args), strict=True):
        if item[-1] in VARYING:
            continue
        if item == "i" and value >= 1 << 31:
            raise UnsupportedProblemError(f"{name} needs to be below 2**31 on a GPU, got {value:,}")
        found.extend(value if item.startswith("*") else (value,))
    return tuple(found)


def values(args: Any) -> Iterator[Any]:
    """Give the value of each of the `fields` of an instance."""
    for value in args:
        if hasattr(value, "_fields"):  # a declaration within it
            yield from values(value)
        else:
            yield value
