"""Numbers in the place of arrays: a scale as ``0.5``."""

import math
from numbers import Real
from typing import Any


def scalar(x: Any) -> float | None:
    """Return a real number of Python or NumPy as a float, and None for all else: arrays (0-d too), bools, text."""
    if isinstance(x, bool) or not (isinstance(x, (int, float)) or _is_numpy_number(x)):
        return None
    try:
        return float(x)
    except OverflowError:  # an int beyond all floats
        return math.inf if x > 0 else -math.inf


def _is_numpy_number(x: Any) -> bool:
    return type(x).__module__ == "numpy" and isinstance(x, Real)  # NumPy is not imported for this: it registers there
