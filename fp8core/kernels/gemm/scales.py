"""Mixes of scales as kernels that scale every 128 of k read them: 1x128 with 1x128 or 128x128.

Kernels read scales by their strides, which are 0 where a scale is broadcast: the scale of a tensor or a row is also the
scale of each of its groups.
"""

from typing import Final

from fp8core.problem import Granularity, ScaledMm

ALONG_K: Final = ("group", "block")
"""Granularities that change along k."""
WITHIN: Final[dict[Granularity, Granularity]] = {"tensor": "block", "row": "group", "block": "block", "group": "group"}
"""The granularity as which a weight's scales are read if any scale of the product changes along k."""


def is_along_k(p: ScaledMm) -> bool:
    """Return whether at least one of the scales changes along k."""
    return p.scale_a in ALONG_K or p.scale_b in ALONG_K


def in_groups(p: ScaledMm) -> ScaledMm:
    """Return ``p`` with both scales along k if one is, at the same strides: scale_a 1x128, scale_b 1x128 or 128x128."""
    return p._replace(scale_a="group", scale_b=WITHIN[p.scale_b]) if is_along_k(p) else p
