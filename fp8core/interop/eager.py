"""Functions that run beside torch.compile's graphs, not inside them; torch is not imported for it."""

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Final, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_CODES: Final[list[CodeType]] = []


def eager_only(function: F) -> F:
    """Return ``function`` itself, marked: torch.compile breaks its graph at a call of it and runs it as it is.

    A call costs nothing more. This is what ``torch.compiler.disable`` does, without importing torch and without a
    wrapper around each call.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    _CODES.append(marked.__code__)
    return function


def traceable(function: Callable[..., Any]) -> None:
    """Take the mark of `eager_only` away: torch.compile traces calls of the function.

    Called from outside of graphs, it goes on running as it is.
    """
    marked: Any = function
    del marked._torchdynamo_disable, marked._torchdynamo_disable_msg


def stand_in(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Have torch.compile trace another function where this one is called."""
    if hasattr(function, "_torchdynamo_disable"):
        traceable(function)
    marked: Any = function
    marked._torchdynamo_inline = other


def skip_frames() -> None:
    """Tell torch.compile, if it is loaded, to leave alone the frames of marked functions and all that they call.

    The marks tell the tracer of a caller where to break; that the function itself is not traced once it is called is
    a property of its code, which the frame evaluation of torch keeps.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None or not _CODES:
        return
    codes = [_CODES.pop() for _ in range(len(_CODES))]
    frames = dynamo.eval_frame
    strategy = getattr(frames, "FrameExecStrategy", None)
    if strategy is None:  # before torch 2.8, a rule for the package's files is all there is
        dynamo.trace_rules.add(__name__.partition(".")[0])
        return
    for code in codes:
        frames.set_code_exec_strategy(code, strategy(frames.FrameAction.SKIP, frames.FrameAction.SKIP))


class _Reason(str):
    """The reason that torch.compile gives for a break: when it is read, torch.compile is loaded and at a call."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        skip_frames()
        return super().__format__(spec)


_REASON: Final = _Reason("fp8core launches kernels that are not torch's")
