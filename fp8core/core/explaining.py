"""How a call is explained instead of made: it goes its way up to where it would be planned."""

from collections.abc import Callable
from typing import Any

from fp8core.table import Explanation


class ExplainRequest:
    """Given as the stream of a call, has the call explained instead of made."""


class Explained(BaseException):
    """Carries an explanation past the public function that was asked for it."""

    def __init__(self, explanation: Explanation) -> None:
        super().__init__()
        self.explanation = explanation


def explanation_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Return which kernels the call ``function(*args, **kwargs)`` would get, and why: it is checked and not made.

    The function takes ``stream`` and makes one call of an `Operation`, which is explained where it would be planned.
    """
    try:
        function(*args, **{**kwargs, "stream": ExplainRequest()})
    except Explained as answer:
        return answer.explanation
    raise AssertionError(f"{function} makes no call that can be explained")
