"""The table of products as a whole: what all of its rows have in common."""

import pytest

from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.explain import example_product
from fp8core.problem import HOST
from fp8core.table import Unknown
from support.problems import TARGETS

SCALES = (("tensor", "tensor"), ("row", "row"), ("group", "block"), ("group", "group"))


@pytest.mark.parametrize("scales", SCALES, ids="-".join)
@pytest.mark.parametrize("target", [*TARGETS, HOST], ids=str)
def test_no_row_takes_scales_of_another_dtype(target, scales):
    """A kernel would read bytes as fp32: a row that takes another dtype has to say so."""
    problem = example_product(target, *scales, m=16)
    other = problem._replace(scale_dtype="float8_e8m0fnu")
    able = [row for row in SCALED_MM.kernels if row.refusal(problem) is None]
    assert able
    for row in able:
        assert row.refusal(other) == "takes scales of float32, got float8_e8m0fnu", row.name
    for row in SCALED_MM.kernels:
        refusal = row.refusal(other)
        assert refusal is not None, row.name
        assert not isinstance(refusal, Unknown), row.name
