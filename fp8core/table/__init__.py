"""Tables of kernels: what each kernel requires, which one runs a problem, and why the others do not."""

from fp8core.table.rows import Check, Choice, Kernel, Launch, Refusal, Requirement, Unknown, no_estimate
from fp8core.table.table import PLANS_KEPT, Table
from fp8core.table.verdicts import COLUMNS, Explanation, Status, Verdict

__all__ = [
    "COLUMNS",
    "PLANS_KEPT",
    "Check",
    "Choice",
    "Explanation",
    "Kernel",
    "Launch",
    "Refusal",
    "Requirement",
    "Status",
    "Table",
    "Unknown",
    "Verdict",
    "no_estimate",
]
