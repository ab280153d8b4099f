"""The arguments of grouped products, and what their launches have in common."""

from typing import Final, NamedTuple, Protocol

from fp8core.kernels.encodings import power_of_two
from fp8core.problem import GroupedMm
from fp8core.runtime.args import Int32, Int64, Pointer


class GroupedLaunch(Protocol):
    """Launches a grouped product: a stream, and addresses of device memory, 0 without a bias."""

    def __call__(
        self, stream: int, a: int, weight: int, scale_a: int, scale_b: int, bias: int, offs: int, out: int, /
    ) -> None:
        """Launch."""


class GroupArgs(NamedTuple):
    """The arguments that follow those of a product: GROUP_PARAMETERS of cuda_src/gemm/grouped_tiles.cuh."""

    offs: Pointer
    groups: Int32
    weight_stride: Int64
    scale_stride: Int64
    bias_stride: Int64

    @classmethod
    def of(cls, p: GroupedMm) -> "GroupArgs":
        """Return the arguments of a problem; each launch fills in the address."""
        return cls(0, p.groups, p.weight_stride, p.scale_stride, p.bias_stride)


LEAST_CAPACITY: Final = 64
"""Groups of the smallest table: one for each lane of a wavefront."""
MOST_GROUPS: Final = 1024
"""Those of the largest table."""


def capacity(p: GroupedMm) -> int:
    """Return how many groups the table of a block has to hold: a power of two, so that few kernels are compiled."""
    return max(LEAST_CAPACITY, power_of_two(p.groups))


def table_bytes(p: GroupedMm) -> int:
    """Return the bytes of that table in shared memory."""
    return 2 * 4 * (capacity(p) + 1)


def most_row_tiles(p: GroupedMm, rows: int) -> int:
    """Return how many tiles of ``rows`` rows all groups can have together, wherever they end.

    A group with rows has one tile, and up to one more for each further ``rows - 3`` rows: its first tile may begin
    up to three rows before it.
    """
    begun = min(p.product.m, p.groups)
    return begun + (p.product.m - begun) // (rows - 3)
