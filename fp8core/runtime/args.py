"""A kernel's parameters, declared once: a named tuple whose annotations say how each one is passed.

    class DequantizeArgs(NamedTuple):
        q: Pointer
        q_stride: Int64
        ...

Its fields have the names and the order of the parameters in the device source; a test compares them
(``tests/runtime/test_args.py``). A field can be another such named tuple and then stands for its fields, so that
parameters of several kernels are declared once. The declaration determines the memory layout of a launch and the
arguments that a launch is called with.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final, get_args, get_type_hints

from fp8core.errors import UnsupportedProblemError

Pointer = Annotated[int, "P"]
"""The address of device memory; differs between launches of a bound kernel."""
Int32 = Annotated[int, "i"]
Int64 = Annotated[int, "q"]
Float32 = Annotated[float, "f"]
Int32Array = Annotated[tuple[int, ...], "*i"]
"""An array by value; its length is an extent passed to `items`."""
TensorMap = Annotated[bytes, "128s"]
"""A CUtensorMap by value; like an address it differs between launches."""

PhasedMaps = Annotated[bytes, "2112s"]
"""Sixteen tensor maps and sixteen 4-byte numbers, by value."""

VARYING: Final = "Ps"
"""The last letter of the items that every launch passes anew; all other parameters are numbers that a bound kernel
keeps."""


def items(args: type, **extents: int) -> tuple[str, ...]:
    """Return the `struct` item of each field of the named tuple ``args``.

    Args:
        args: the declaration.
        **extents: the length of each `Int32Array`, by the field's name.
    """
    return tuple(item.replace("*", str(extents.get(name, ""))) for name, item in fields(args).items())


_FIELDS: Final[dict[type, dict[str, str]]] = {}


def fields(args: type) -> dict[str, str]:
    """Return the `struct` item of each field by the field's name; "*i" for an array."""
    if args not in _FIELDS:
        found: dict[str, str] = {}
        for name, hint in get_type_hints(args, include_extras=True).items():
            found.update(fields(hint) if isinstance(hint, type) else {name: get_args(hint)[1]})
        _FIELDS[args] = found
    return _FIELDS[args]


def numbers(args: Any) -> tuple[Any, ...]:
    """Return the values of an instance that stay the same in all launches, in the order of fields, arrays flattened.

    Raises:
        UnsupportedProblemError: an extent is too large for kernels, which hold it in 32 bits.
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
    """Yield the value of each of the `fields` of an instance."""
    for value in args:
        if hasattr(value, "_fields"):  # a nested declaration
            yield from values(value)
        else:
            yield value
