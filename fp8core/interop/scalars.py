"""Numbers given instead of arrays, such as ``0.5`` for a scale."""

import math
from numbers import Real
from typing import Any


def scalar(x: Any) -> float | None:
    """Return a real number of Python or NumPy as a float; None for anything else: arrays (also 0-d), bools, text.

    A symbol of torch.export becomes its value, which the graph is for then.
    """
    if isinstance(x, bool) or not (isinstance(x, (int, float)) or _is_number_of_framework(x)):
        return None
    # torch.compile traces no OverflowError, and makes a float of a module (sys.float_info) an input of a dynamic graph
    if isinstance(x, int) and abs(x) > (2.0 - 2.0**-52) * 2.0**1023:  # the largest float
        return math.inf if x > 0 else -math.inf
    return float(x)


def _is_number_of_framework(x: Any) -> bool:
    kind = type(x)  # without importing NumPy, which registers its types
    return (kind.__module__ == "numpy" and isinstance(x, Real)) or (
        kind.__module__ == "torch" and kind.__name__ in ("SymInt", "SymFloat")
    )
