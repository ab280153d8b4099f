"""Requirements of rows of `grouped_scaled_mm_nt`, each with its refusal."""

from typing import Final

from fp8core.kernels.grouped.args import MOST_GROUPS
from fp8core.table import Requirement

FEW_GROUPS: Final = Requirement(
    lambda p: p.groups <= MOST_GROUPS, f"needs at most {MOST_GROUPS} groups, got {{p.groups}}"
)
WEIGHTS_FOLLOW: Final = Requirement(
    lambda p: p.groups == 1 or p.weight_stride == p.product.n * p.product.ldb,
    "needs weights of groups that follow each other like further rows, got {p.weight_stride} elements from one to the"
    " next for n={p.product.n} with rows of {p.product.ldb}",
)
