"""The common part of kernels over fused shards: the end of each shard, passed by value in the arguments."""

from itertools import accumulate
from typing import Final

from fp8core.table import Requirement

CAPACITIES: Final = (8, 64, 512)
"""How many shards a compiled kernel takes."""
NO_END: Final = 2**31 - 1


FEW_SHARDS: Final = Requirement(
    lambda p: p.shards <= CAPACITIES[-1], f"needs at most {CAPACITIES[-1]} shards, got {{p.shards}}"
)


def capacity_of(shards: int) -> int:
    """Return the least capacity that holds ``shards`` shards."""
    return next(capacity for capacity in CAPACITIES if shards <= capacity)


def ends_of(widths: tuple[int, ...], capacity: int) -> tuple[int, ...]:
    """Return the number of rows up to the end of each shard, and the largest int32 after the last one."""
    ends = tuple(accumulate(widths))
    return ends + (NO_END,) * (capacity - len(ends))
