"""How large the grid of a launch may be: by CUDA in blocks, by HIP in threads along each axis, too."""

from typing import Final

from fp8core.problem import Target

CUDA_BLOCKS: Final = (1 << 31) - 1
"""The blocks of a grid along x."""
BLOCKS_ALONG_YZ: Final = (1 << 16) - 1
"""The same along y, and along z; grids for HIP keep to it, too."""
HIP_THREADS: Final = (1 << 32) - 1
"""The threads of a grid along each axis: a packet of the queue counts them in 32 bits. With more, hipModuleLaunchKernel
answers hipErrorInvalidValue."""


def blocks_along_x(target: Target, threads: int) -> int:
    """Return how many blocks of so many threads a grid can have along x."""
    return min(CUDA_BLOCKS, HIP_THREADS // threads) if target.platform == "hip" else CUDA_BLOCKS
