"""Marks functions that run outside torch.compile's graphs, without importing torch."""

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Final, TypeVar

from fp8core.forks import ForkSafeLock

F = TypeVar("F", bound=Callable[..., Any])

_CODES: Final[dict[CodeType, str]] = {}
"""Actions for the frames of marked functions that torch.compile has not been told yet."""
_TELLING: Final = ForkSafeLock()
"""Of the thread that tells them: others wait, as they are about to compile."""


def eager_only(function: F) -> F:
    """Mark ``function`` and return it: torch.compile breaks its graph at a call of it, and does not compile it.

    The mark adds no time to a call. ``torch.compiler.disable`` does the same, but needs torch and wraps each call.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    _CODES[marked.__code__] = "SKIP"
    return function


def traceable(function: Callable[..., Any]) -> None:
    """Remove the mark of `eager_only`: torch.compile traces calls of the function, and the function itself."""
    _unmark(function)
    with _TELLING.held:
        _CODES[function.__code__] = "DEFAULT"
        skip_frames()


def stand_in(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Make torch.compile trace ``other`` where ``function`` is called."""
    _unmark(function)
    marked: Any = function
    marked._torchdynamo_inline = other


def _unmark(function: Any) -> None:
    if hasattr(function, "_torchdynamo_disable"):
        del function._torchdynamo_disable, function._torchdynamo_disable_msg


def skip_frames() -> None:
    """Tell torch.compile, if it is loaded, not to compile the frames of marked functions and everything they call.

    The mark makes the tracer break at the call in the caller's frame. That the function's own frame is not traced is a
    property of its code object, stored by torch's frame evaluation. For traceable functions only their callees are
    skipped.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    frames: Any = getattr(dynamo, "eval_frame", None)  # none yet if another thread is importing it
    if frames is None or not _CODES:
        return
    strategy: Any = getattr(frames, "FrameExecStrategy", None)
    with _TELLING.held:
        if strategy is None:  # torch before 2.8 only has a rule for all files of a package
            dynamo.trace_rules.add(__name__.partition(".")[0])
            _CODES.clear()
        for code, action in list(_CODES.items()):
            frames.set_code_exec_strategy(code, strategy(getattr(frames.FrameAction, action), frames.FrameAction.SKIP))
            _CODES.pop(code, None)  # now, so that Ctrl-C loses none


skip_frames._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run by torch.compile while it traces


class _Reason(str):
    """The reason that torch.compile gives for a graph break; formatting it there calls `skip_frames`."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        skip_frames()
        return super().__format__(spec)


_REASON: Final = _Reason("fp8core launches kernels that are not torch's")
