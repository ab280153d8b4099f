"""Functions that run beside torch.compile's graphs, not inside them; torch is not imported for it."""

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Final, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_CODES: Final[dict[CodeType, str]] = {}
"""What torch.compile is yet to be told of the frames of marked functions."""


def eager_only(function: F) -> F:
    """Return ``function`` itself, marked: torch.compile breaks its graph at a call of it and runs it as it is.

    A call costs nothing more. This is what ``torch.compiler.disable`` does, without importing torch and without a
    wrapper around each call.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    _CODES[marked.__code__] = "SKIP"
    return function


def traceable(function: Callable[..., Any]) -> None:
    """Take the mark of `eager_only` away: torch.compile traces calls of the function, and the function itself."""
    _unmark(function)
    _CODES[function.__code__] = "DEFAULT"
    skip_frames()


def stand_in(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Have torch.compile trace another function where this one is called."""
    _unmark(function)
    marked: Any = function
    marked._torchdynamo_inline = other


def _unmark(function: Any) -> None:
    if hasattr(function, "_torchdynamo_disable"):
        del function._torchdynamo_disable, function._torchdynamo_disable_msg


def skip_frames() -> None:
    """Tell torch.compile, if it is loaded, to leave alone the frames of marked functions and all that they call.

    The marks tell the tracer of a caller where to break; that the function itself is not traced once it is called is
    a property of its code, which the frame evaluation of torch keeps. Of traceable functions it is what they call.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None or not _CODES:
        return
    codes = [_CODES.popitem() for _ in range(len(_CODES))]
    frames = dynamo.eval_frame
    strategy = getattr(frames, "FrameExecStrategy", None)
    if strategy is None:  # before torch 2.8, a rule for the package's files is all there is
        dynamo.trace_rules.add(__name__.partition(".")[0])
        return
    for code, action in codes:
        frames.set_code_exec_strategy(code, strategy(getattr(frames.FrameAction, action), frames.FrameAction.SKIP))


skip_frames._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a trace that meets a call of it makes the call


class _Reason(str):
    """The reason that torch.compile gives for a break: when it is read, torch.compile is loaded and at a call."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        skip_frames()
        return super().__format__(spec)


_REASON: Final = _Reason("fp8core launches kernels that are not torch's")
