"""Numbers given instead of arrays, such as ``0.5`` for a scale."""

import math
import sys
from numbers import Real
from typing import Any


def scalar(x: Any) -> float | None:
    """Return a real number of Python or NumPy as a float; None for anything else: arrays (also 0-d), bools, text."""
    if isinstance(x, bool) or not (isinstance(x, (int, float)) or _is_numpy_number(x)):
        return None
    if isinstance(x, int) and abs(x) > sys.float_info.max:  # torch.compile traces no OverflowError
        return math.inf if x > 0 else -math.inf
    return float(x)


def _is_numpy_number(x: Any) -> bool:
    return type(x).__module__ == "numpy" and isinstance(x, Real)  # without importing NumPy, which registers its types
