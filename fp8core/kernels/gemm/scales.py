"""Mixes of scales in the terms of kernels that scale every 128 of k by 1x128 with 1x128 or 128x128.

Kernels read scales by their strides, which are 0 where a scale is broadcast: one scale for a tensor or a row is one for
each of its groups, too.
"""

from typing import Final

from fp8core.problem import Granularity, ScaledMm

ALONG_K: Final = ("group", "block")
"""Granularities that change along k."""
WITHIN: Final[dict[Granularity, Granularity]] = {"tensor": "block", "row": "group", "block": "block", "group": "group"}
"""How a weight's scales are read beside those of a product that change along k."""


def is_along_k(p: ScaledMm) -> bool:
    """Return whether one of the scales, at least, changes along k."""
    return p.scale_a in ALONG_K or p.scale_b in ALONG_K


def in_groups(p: ScaledMm) -> ScaledMm:
    """Return ``p`` with both scales along k if one is, at the same strides: scale_a 1x128, scale_b 1x128 or 128x128."""
    return p._replace(scale_a="group", scale_b=WITHIN[p.scale_b]) if is_along_k(p) else p
