"""What a call may do: give the right numbers, or refuse in the library's words with nothing written."""

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from fp8core import DTypeError, Fp8Error
from soak.arena import Arena, Place

NEEDED = re.compile(r"\b(needs?|must|takes?)\b")
GOT = re.compile(r"\bgot\b")


def refusal_of(call: Callable[[], Any]) -> tuple[Any, Fp8Error | None]:
    """Return the call's result, or its refusal; any other exception and every warning is an error of the test."""
    with warnings.catch_warnings(action="error"):
        try:
            return call(), None
        except Fp8Error as error:
            return None, error


def check_words(error: Fp8Error, names: Iterable[str]) -> None:
    """Assert that a refusal is one of Python's kinds, too, and says which operand, what was needed and what was got."""
    text = str(error)
    kind = TypeError if isinstance(error, DTypeError) else ValueError
    assert isinstance(error, kind), f"{type(error).__name__} is no {kind.__name__}: {text}"
    names = list(names)
    assert any(re.search(rf"\b{re.escape(name)}\b", text) for name in names), f"names none of {names}: {text}"
    assert NEEDED.search(text), f"does not say what was needed: {text}"
    assert GOT.search(text), f"does not say what was got: {text}"


def judge(
    arena: Arena,
    call: Callable[[], Any],
    names: Iterable[str],
    *,
    written: tuple[Place, ...] = (),
    must: str | None = None,
) -> Any:
    """Return the result of a call, or None where it refused, which is checked.

    Args:
        arena: where its operands lie.
        call: makes it.
        names: of the operands that a refusal may be about.
        written: what a call that succeeds may write.
        must: "answer" or "refuse" where only that is right.
    """
    result, error = refusal_of(call)
    if error is not None:
        changed = arena.changed()
        assert not changed, f"refused, and yet {len(changed)} bytes were written: {error!r}"
        assert must != "answer", f"refused what is right: {error!r}"
        check_words(error, names)
        return None
    assert must != "refuse", f"took what has to be refused, and gave {describe(result)}"
    changed = arena.changed(written)
    assert not changed, f"{len(changed)} bytes outside of the results were written, first at {changed[0]}"
    return result


def describe(result: Any) -> str:
    """Return a result's shapes and dtypes."""
    parts = result if isinstance(result, tuple) else (result,)
    return ", ".join(f"{type(x).__name__}{getattr(x, 'shape', '')} {getattr(x, 'dtype', '')}" for x in parts)
