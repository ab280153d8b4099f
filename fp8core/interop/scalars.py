"""Numbers given instead of arrays, such as ``0.5`` for a scale."""

import math
import sys
from numbers import Real
from typing import Any


def scalar(x: Any) -> float | None:
    """Return a real number of Python or NumPy as a float; None for anything else: arrays (also 0-d), bools, text.

    A symbol of torch.export becomes its value, which the graph is for then.
    """
    if isinstance(x, bool) or not (isinstance(x, (int, float)) or _is_number_of_framework(x)):
        return None
    if isinstance(x, int) and abs(x) > sys.float_info.max:  # torch.compile traces no OverflowError
        return math.inf if x > 0 else -math.inf
    return float(x)


def _is_number_of_framework(x: Any) -> bool:
    kind = type(x)  # without importing NumPy, which registers its types
    return (kind.__module__ == "numpy" and isinstance(x, Real)) or (
        kind.__module__ == "torch" and kind.__name__ in ("SymInt", "SymFloat")
    )
