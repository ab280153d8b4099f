"""use_fast_accum on a GPU: where it is False every row sums with fp32's accuracy, however deep k is."""

import pytest

from fp8core.kernels.gemm.table import SCALED_MM
from support.gpu_products import EXACT, case, error, launch, result

pytestmark = pytest.mark.gpu

MODES = [("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("group", "block"), ("group", "group")]
FAST_MODES = ("cublaslt", "hipblaslt", "sm90_tiled", "generic_mma")
"""How the names of rows begin that have a faster mode with fewer bits."""


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("m", [16, 64, 128])
@pytest.mark.parametrize("k", [16384, 53248])
def test_every_row_is_exact_without_fast_accumulation(modes, m, k):
    made = case(*modes, m=m, n=256, k=k, layout="mn", seed=m, fast=False, out="float32")
    for choice in SCALED_MM.candidates(made.problem):
        made.storage[...] = 0xA5
        launch(made, SCALED_MM.planned(made.problem, choice))
        assert error(result(made), made.want) <= EXACT / 4, choice


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("m", [16, 128])
def test_rows_of_our_own_give_the_same_bits_either_way(modes, m):
    """A kernel that accumulates with fewer bits when it may belongs in the table of docs/make_accuracy.py."""
    made = case(*modes, m=m, n=256, k=8192, layout="mn", seed=m)
    exact = made.problem._replace(use_fast_accum=False)
    both = set(SCALED_MM.candidates(made.problem)) & set(SCALED_MM.candidates(exact))
    for choice in (choice for choice in both if not choice.kernel.startswith(FAST_MODES)):
        results = []
        for p in (made.problem, exact):
            made.storage[...] = 0xA5
            launch(made, SCALED_MM.planned(p, choice))
            results.append(result(made))
        assert (results[0] == results[1]).all(), choice
