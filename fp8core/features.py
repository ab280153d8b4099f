"""The features of a target's instruction set, as data: kernels require features, never an architecture's number."""

from collections.abc import Callable
from functools import cache
from typing import Final, Literal, get_args

from fp8core.target import Target

Feature = Literal["fp8_mma", "wgmma", "tcgen05", "mxfp8", "tma", "clusters", "pdl"]
"""fp8_mma: FP8 matrix instructions of a warp or wavefront in hardware (mma.sync, MFMA, WMMA); wgmma and tcgen05: the
matrix instructions of sm_90 and of sm_100; mxfp8: matrix instructions that apply 1x32 ue8m0 scales; tma: bulk tensor
copies; clusters: thread block clusters with distributed shared memory; pdl: programmatic dependent launch."""

HARDWARE: Final[dict[Feature, str]] = {
    "fp8_mma": "sm_89, sm_120 and later, gfx942, gfx950, gfx1200, gfx1201",
    "wgmma": "sm_90",
    "tcgen05": "sm_100 to sm_110",
    "mxfp8": "sm_100 and later, gfx950",
    "tma": "sm_90 and later",
    "clusters": "sm_90 and later",
    "pdl": "sm_90 and later",
}
"""The architectures with each feature, in the words of a refusal."""
CUDA: Final[dict[Feature, Callable[[int], bool]]] = {
    "fp8_mma": lambda arch: arch == 89 or arch >= 120,
    "wgmma": lambda arch: arch == 90,
    "tcgen05": lambda arch: 100 <= arch < 120,
    "mxfp8": lambda arch: arch >= 100,
    "tma": lambda arch: arch >= 90,
    "clusters": lambda arch: arch >= 90,
    "pdl": lambda arch: arch >= 90,
}
"""Whether a compute capability has each feature. (On sm_90 and sm_100, FP8 mma.sync is compiled to 16-bit
instructions.)"""
HIP: Final[dict[int, frozenset[Feature]]] = {
    0x942: frozenset({"fp8_mma"}),
    0x950: frozenset({"fp8_mma", "mxfp8"}),
    0x1200: frozenset({"fp8_mma"}),
    0x1201: frozenset({"fp8_mma"}),
}
"""The features of each architecture; all others have none."""


@cache
def features(target: Target) -> frozenset[Feature]:
    """Return the features of a target's instruction set; the host has none."""
    if target.platform == "cuda":
        return frozenset(feature for feature in get_args(Feature) if CUDA[feature](target.arch))
    return HIP.get(target.arch, frozenset()) if target.platform == "hip" else frozenset()
