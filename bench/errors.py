"""The error of a result against the right one."""

import math
from typing import Any


def relative(found: Any, wanted: Any) -> float:
    """Return the relative error of a tensor in the Frobenius norm, in float64; infinite if there is a NaN.

    (A NaN would be below no bound, but `max` drops it.)
    """
    wide = wanted.double()
    error = float((found.double() - wide).norm() / wide.norm())
    return math.inf if math.isnan(error) else error
