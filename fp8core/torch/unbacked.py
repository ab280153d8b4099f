"""Extents that are unknown while tracing (torch's unbacked symbols), such as the number of tokens that a router picks.

`Operation.describe` compares extents with 0, with 1 and with each other. Comparing an unbacked symbol ends a trace; an
`Unknown` compares like a number above 1 that is equal to no other. Results may depend on whether it is above a larger
number or another extent: such comparisons are refused.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch

from fp8core.errors import ShapeError


def _computed(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the methods of an arithmetic operator for an `Unknown` as its left and as its right operand."""
    return (
        lambda self, other: Unknown(function(self.symbol, known(other))),
        lambda self, other: Unknown(function(known(other), self.symbol)),
    )


def _compared(function: Callable[[Any, Any], Any], otherwise: bool) -> Callable[..., bool]:
    """Return the method of a comparison: it returns the answer if torch knows it, else ``otherwise``."""
    ordered = function not in (operator.eq, operator.ne)

    def answer(self: "Unknown", other: Any) -> bool:
        from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

        asked = function(self.symbol, known(other))
        true, false = guard_or_false(asked), not guard_or_true(asked)
        if not true and not false and ordered and not (isinstance(other, int) and other <= 1):
            raise ShapeError(f"a traced call needs an extent that can be compared with {other}, got {self}")
        return true or (otherwise and not false)

    return answer


class Unknown:
    """An extent computed from unbacked symbols."""

    __slots__ = ("symbol",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, symbol: Any) -> None:
        self.symbol = symbol

    def __repr__(self) -> str:
        return str(self.symbol)

    def __index__(self) -> int:
        raise ShapeError(f"a traced call needs an extent that is known here, got {self}")

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __neg__(self) -> "Unknown":
        return Unknown(-self.symbol)

    def __or__(self, other: Any) -> Any:
        """Return an odd number: alignments are computed by bitwise or, and an unknown extent has no alignment."""
        return 1 | known(other)

    __ror__ = __or__
    __add__, __radd__ = _computed(operator.add)
    __sub__, __rsub__ = _computed(operator.sub)
    __mul__, __rmul__ = _computed(operator.mul)
    __floordiv__, __rfloordiv__ = _computed(operator.floordiv)
    __mod__, __rmod__ = _computed(operator.mod)
    __eq__ = _compared(operator.eq, False)
    __ne__ = _compared(operator.ne, True)
    __lt__ = _compared(operator.lt, False)
    __le__ = _compared(operator.le, False)
    __gt__ = _compared(operator.gt, True)
    __ge__ = _compared(operator.ge, True)


def known(extent: Any) -> Any:
    """Return an extent as a number or symbol of torch."""
    return extent.symbol if isinstance(extent, Unknown) else extent


def extents(of: Any) -> tuple[Any, ...]:
    """Return the extents or strides of a tensor, with an `Unknown` for each unbacked one."""
    given = tuple(of)
    if not any(isinstance(one, torch.SymInt) for one in given):
        return given
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    return tuple(Unknown(one) if has_free_unbacked_symbols(one) else one for one in given)
