"""The values of FP8 codes, for arrays of a framework without FP8."""

from typing import Any

from fp8core.dtypes import FORMATS


def equal(codes: Any, others: Any, dtype: str) -> Any:
    """Return where codes (two arrays, or an array and a number) have equal values, by their bits: CuPy has no FP8."""
    known = FORMATS.get(dtype)
    if known is None or known.fnuz:  # one NaN, and at most one zero
        return (codes == others) & (codes != (0xFF if known is None else known.nan))
    largest = 0x7C if known.mantissa == 2 else 0x7E  # infinity; e4m3fn has none
    return ((codes == others) & ((codes & 0x7F) <= largest)) | (((codes | others) & 0x7F) == 0)


def code_of(number: float, dtype: str) -> int | None:
    """Return a code of this value, or None if the format cannot represent it."""
    import ml_dtypes
    import numpy as np

    values = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float64)
    found = np.flatnonzero(values == number)
    return int(found[0]) if found.size else None
