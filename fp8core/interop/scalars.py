"""Numbers in the place of arrays: a scale as ``0.5``."""

import math
from typing import Any

import numpy as np


def scalar(x: Any) -> float | None:
    """Return a real number of Python or NumPy as a float, and None for all else: arrays (0-d too), bools, text."""
    if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)):
        return None
    try:
        return float(x)
    except OverflowError:  # an int beyond all floats
        return math.inf if x > 0 else -math.inf
