"""The largest grid of a launch, and the alignment of its scratch.

CUDA limits the blocks along each axis of a grid, HIP also the threads.
"""

from typing import Final

from fp8core.problem import Target

CUDA_BLOCKS: Final = (1 << 31) - 1
"""The most blocks of a grid along x."""
BLOCKS_ALONG_YZ: Final = (1 << 16) - 1
"""The most blocks of a grid along y, and along z; grids for HIP keep to it too."""
HIP_THREADS: Final = (1 << 32) - 1
"""The most threads of a grid along each axis: a dispatch packet holds their number in 32 bits. With more,
hipModuleLaunchKernel returns hipErrorInvalidValue."""

SCRATCH_ALIGNMENT: Final = 256
"""Alignment in bytes of the scratch of a launch, and of each part of it."""


def blocks_along_x(target: Target, threads: int) -> int:
    """Return how many blocks of ``threads`` threads a grid can have along x."""
    return min(CUDA_BLOCKS, HIP_THREADS // threads) if target.platform == "hip" else CUDA_BLOCKS
