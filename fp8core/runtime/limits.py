"""The largest grid of a launch, and the alignment of its scratch.

CUDA limits the blocks along each axis of a grid, HIP also the threads.
"""

from typing import Final

from fp8core.errors import UnsupportedProblemError
from fp8core.target import Target

CUDA_BLOCKS: Final = (1 << 31) - 1
"""The most blocks of a grid along x."""
BLOCKS_ALONG_YZ: Final = (1 << 16) - 1
"""The most blocks of a grid along y, and along z; grids for HIP keep to it, too, with one thread of a block there."""
HIP_THREADS: Final = (1 << 32) - 1
"""The most threads of a grid along each axis: a dispatch packet holds their number in 32 bits. With more,
hipModuleLaunchKernel returns hipErrorInvalidValue."""

SCRATCH_ALIGNMENT: Final = 256
"""Alignment in bytes of the scratch of a launch, and of each part of it."""


def blocks_along_x(target: Target, threads: int) -> int:
    """Return how many blocks of ``threads`` threads a grid can have along x."""
    return min(CUDA_BLOCKS, HIP_THREADS // threads) if target.platform == "hip" else CUDA_BLOCKS


def check_grid(target: Target, entry: str, grid: tuple[int, int, int], threads: int) -> None:
    """Refuse a grid that no launch can have; ``threads``: of a block, along x.

    Raises:
        UnsupportedProblemError: it has too many blocks along an axis.
    """
    limits = blocks_along_x(target, threads), BLOCKS_ALONG_YZ, BLOCKS_ALONG_YZ
    for axis, blocks, most in zip("xyz", grid, limits, strict=True):
        if blocks > most:
            text = f"needs at most {most} blocks of {threads} threads along {axis}, got a grid of {grid}"
            raise UnsupportedProblemError(f"{entry} on {target} {text}")
