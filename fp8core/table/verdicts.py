"""Verdicts and explanations: the status of each kernel of a table for a problem, as text."""

from textwrap import fill
from typing import Any, Final, Literal, NamedTuple

from fp8core.table.rows import Choice, Kernel, Unknown

COLUMNS: Final = 100
"""The width, in columns, of the text of a problem in an explanation."""

Status = Literal["chosen", "able", "not preferred", "unable", "unknown"]


class Verdict(NamedTuple):
    """The status of one kernel of a table for one problem, and the reason.

    Examples:
        >>> import numpy as np, fp8core
        >>> verdict = fp8core.explain(fp8core.quantize, np.ones((2, 32), np.float32)).verdicts[0]
        >>> verdict.kernel, verdict.status
        ('host', 'chosen')
    """

    kernel: str
    status: Status
    """"chosen", "able", "not preferred" (able, and measured or estimated to be slower than another), "unable" or
    "unknown"."""
    reason: str
    """The reason for the status; empty if there is none to give."""

    def __str__(self) -> str:
        status = "able but not preferred" if self.status == "not preferred" else self.status
        return f"{status}{': ' + self.reason if self.reason else ''}"


class Explanation(NamedTuple):
    """A problem, and the verdict on every kernel of its table, in the order of preference.

    Examples:
        >>> import numpy as np, fp8core
        >>> explanation = fp8core.explain(fp8core.quantize, np.ones((2, 32), np.float32))
        >>> explanation.chosen, explanation.short
        ('host', 'Quantize: host')
        >>> print(explanation)  # doctest: +ELLIPSIS
        Quantize(target=host, x=float32, ...
          host               chosen
          rowwise            unable: ...
    """

    problem: Any
    verdicts: tuple[Verdict, ...]
    before: tuple["Explanation", ...] = ()
    """The explanations of the call's earlier steps, such as a linear layer's quantization of its input."""

    @property
    def chosen(self) -> str | None:
        """The name of the kernel that runs the problem; None if no kernel can."""
        return next((v.kernel for v in self.verdicts if v.status == "chosen"), None)

    @property
    def short(self) -> str:
        """All steps in one line: for each the problem and its kernel, or "none"."""
        steps = (*self.before, self)
        return ", ".join(f"{type(step.problem).__name__}: {step.chosen or 'none'}" for step in steps)

    def __str__(self) -> str:
        steps = (*self.before, self)
        told = {type(step.problem) for step in steps}
        return "\n".join(step._text(told) for step in steps)

    def _text(self, told: set[type]) -> str:
        width = max(len(v.kernel) for v in self.verdicts)
        lines = [f"  {v.kernel:<{width}}  {v}" for v in self.verdicts]
        text = _with_fields(self.problem, told)
        first = fill(text, COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        return "\n".join([first, *lines])


def _with_fields(problem: Any, told: set[type]) -> str:
    """Return a problem with its fields as text; a nested problem of a type that is ``told`` beside it is only named."""
    fields = ", ".join(f"{name}={_field(value, told)}" for name, value in problem._asdict().items())
    return f"{type(problem).__name__}({fields})"


def _field(value: Any, told: set[type]) -> str:
    if hasattr(value, "target"):
        return f"{type(value).__name__}(…)" if type(value) in told else _with_fields(value, told)
    return str(value) or "none"


def verdict(kernel: Kernel, problem: Any, chosen: Choice | None, tuned: bool, first: Kernel | None) -> Verdict:
    """Return the verdict on ``kernel``, given that ``chosen`` runs ``problem``, and ``first`` would without tuning."""
    refusal = kernel.refusal(problem)
    if refusal is not None:
        return Verdict(kernel.name, "unknown" if isinstance(refusal, Unknown) else "unable", refusal)
    us = kernel.us(problem)
    word, shown = ("estimated", us) if us is not None else ("roughly", kernel.rough(problem))
    estimate = "" if shown is None else f"{word} {shown:.1f} us"
    if chosen is not None and kernel.name == chosen.kernel:
        reason = f"tuned, algorithm {chosen.algorithm}" if tuned else estimate
        return Verdict(kernel.name, "chosen", _joined(reason, kernel.note))
    reservation = kernel.reservation(problem)
    if reservation is not None:
        return Verdict(kernel.name, "not preferred", _joined(estimate, reservation))
    least = first.us(problem) if first is not None else None
    if first is not None and least is not None and us is not None and kernel is not first:
        return Verdict(kernel.name, "not preferred", f"{estimate}, {first.name} {least:.1f} us")
    return Verdict(kernel.name, "able", _joined(estimate, kernel.note))


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))
