"""Converts values read from JSON back to named tuples, and checks the type of every field."""

from functools import cache
from types import EllipsisType
from typing import Any, Literal, get_args, get_origin, get_type_hints


def typed(kind: Any, given: Any, name: str) -> Any:
    """Convert a value of JSON to a type: a named tuple, a tuple, a ``Literal``, or a plain type.

    Args:
        kind: the type, as an annotation.
        given: for a named tuple a dictionary or list of all its fields; for a tuple a list.
        name: the name of the value in error messages.

    Raises:
        ValueError: the value does not have the type.
    """
    if get_origin(kind) is Literal:
        if given in get_args(kind):
            return given
    elif get_origin(kind) is tuple:
        kinds = get_args(kind)
        if isinstance(given, list):
            if kinds[-1] is Ellipsis:
                return tuple(typed(kinds[0], one, name) for one in given)
            if len(given) == len(kinds):
                return tuple(typed(*pair, name) for pair in zip(kinds, given, strict=True))
    elif hasattr(kind, "_fields"):
        fields = _fields(kind)
        values = dict(zip(fields, given, strict=False)) if isinstance(given, list) else given
        if isinstance(values, dict) and values.keys() == fields.keys() and len(values) == len(given):
            return kind(**{field: typed(of, values[field], field) for field, of in fields.items()})
    elif type(given) is kind or (kind is float and type(given) is int):
        return given
    raise ValueError(f"{name} needs {_type_name(kind)}, got {repr(given)[:80]}")


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        return "a list" if isinstance(kinds[-1], EllipsisType) else f"a list of {len(kinds)}"
    if hasattr(kind, "_fields"):
        return f"the fields {', '.join(_fields(kind))} and no others"
    return {str: "text", bool: "true or false", int: "a whole number", float: "a number"}[kind]
