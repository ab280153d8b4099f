"""Rows of all tables of products take no scales of a granularity that they do not know: they would misread them."""

from collections.abc import Iterator
from typing import Any

import pytest

from fp8core.errors import UnsupportedProblemError
from fp8core.kernels.gemm.generic import plan_decode
from fp8core.kernels.gemm.realigned import realigned
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.grouped.table import GROUPED_MM
from fp8core.kernels.linear.table import LINEAR
from fp8core.ops.example_problems import example_product
from fp8core.problem import ScaledMm
from fp8core.table import Kernel, Refusal, Unknown
from fp8core.target import ABSENT, HOST
from support import problems
from support.targets import TARGETS, on

UNKNOWN = "3x5"
"""A granularity that does not exist."""
EVERYWHERE = (*(target._replace(device=ABSENT) for target in TARGETS), HOST)
"""Absent devices: no library on this machine is asked."""
TABLES = ((SCALED_MM, problems.scaled_mm), (GROUPED_MM, problems.grouped_mm), (LINEAR, problems.linear))
RAGGED = example_product(on(90)._replace(device=ABSENT), "group", "block", m=301)
"""A product of which cuBLASLt multiplies most rows, or padded ones."""


def all_problems() -> Iterator[tuple[Any, Any]]:
    """Yield problems of every table, which together each row takes."""
    for table, make in TABLES:
        yield from ((table, problem) for target in EVERYWHERE for problem in make(target))
    yield SCALED_MM, RAGGED


def with_scales(problem: Any, **scales: str) -> Any:
    """Return a problem whose product has other scales."""
    if isinstance(problem, ScaledMm):
        return problem._replace(**scales)
    return problem._replace(product=problem.product._replace(**scales))


@pytest.mark.parametrize(
    ("scale", "granularity"), [("scale_a", UNKNOWN), ("scale_b", UNKNOWN), ("scale_a", "block")], ids=str
)
def test_every_row_refuses_a_granularity_that_it_does_not_state(scale, granularity):
    taken = set()
    for table, problem in all_problems():
        other, asked = with_scales(problem, **{scale: granularity}), set()
        for row in table.kernels:
            reason = row.refusal(problem)
            if reason is None or isinstance(reason, Unknown):
                asked.add(row.name)
                refusal = row.refusal(other)
                assert isinstance(refusal, Refusal), row.name
                assert f"{scale} per {granularity}" in refusal, row.name
        assert asked, problem
        taken |= {(table.name, name) for name in asked}
        with pytest.raises(UnsupportedProblemError, match=f"{scale} per {granularity}"):
            table.plan(tuple(other))
    assert taken == {(table.name, row.name) for table, _ in TABLES for row in table.kernels}


def test_copies_take_no_scales_that_the_kernel_of_the_last_channels_does_not():
    """An inner row that takes other scales is not enough: generic_decode multiplies up to seven channels."""
    copies = realigned((Kernel("anything", (), plan_decode),))
    odd = example_product(on(89), "group", "block", m=300)._replace(n=4101, ldo=4101)
    assert copies.refusal(odd) is None
    assert f"scale_b per {UNKNOWN}" in copies.refusal(odd._replace(scale_b=UNKNOWN))
