"""Detects wrong scales from the codes and scales of FP8 weights, without the original weights."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8core.checkpoint.disk.files import read_rows
from fp8core.checkpoint.disk.writing import Advance
from fp8core.checkpoint.formats.kinds import without_numbers
from fp8core.checkpoint.reading.faults import Fault
from fp8core.checkpoint.reading.layers import Layer, Tensor, as_float32
from fp8core.checkpoint.reading.values import are_powers_of_two
from fp8core.host.codes import decode_table

USUAL: Final = 1e-4, 4.0
"""The range of a weight's usual magnitude: the median magnitude of the values of its nonzero codes."""
USUAL_MEDIAN: Final = 2e-2
"""The magnitude that is assumed as typical if no layer of the checkpoint has a usual magnitude."""
FAR, NEAR = 100.0, 30.0
"""A scale is reported if the layer's magnitude differs from the others' by a factor of at least FAR, but by one of at
most NEAR under another reading of the scale."""
OF_A_COUNT: Final = 8
"""The bytes that NumPy needs per code to count it."""
GROUPS_THAT_TELL: Final = 8
"""With at least this many groups, it is no coincidence if all scales are powers of two and all groups have the largest
code."""


class Measured(NamedTuple):
    """The measurements of a layer."""

    layer: Layer
    nans: int
    """The number of codes that are NaN or infinite."""
    code: float
    """The median magnitude of the nonzero codes; NaN if all are zero."""
    scale: float
    """The median scale."""
    raised: bool
    """Whether all scales are powers of two and every group has a code of the format's largest magnitude."""

    @property
    def magnitude(self) -> float:
        """The typical magnitude of the weight's values."""
        return self.code * self.scale


@cache
def magnitudes(dtype: str) -> NDArray[np.float32]:
    """Return the magnitudes of the 256 codes, including NaN and infinity."""
    return np.abs(decode_table(dtype))


def scale_faults(tensor: Tensor) -> Iterator[Fault]:
    """Yield the faults in the numbers of a scale."""
    if not tensor.nbytes:
        return
    numbers = as_float32(tensor.read())
    finite = np.isfinite(numbers)
    for wrong, what in (
        (~finite, "not finite"),
        (finite & (numbers == 0), "zero"),
        (finite & (numbers < 0), "negative"),
    ):
        count = int(np.count_nonzero(wrong))
        if count:
            of = f"{count:,} of {numbers.size:,}" if numbers.size > 1 else "it"
            where = f", the first at {[int(i) for i in np.argwhere(wrong)[0]]}" if numbers.ndim else ""
            verb = "is" if count == 1 else "are"
            text = f"{tensor.name} needs finite numbers above 0, but {of} {verb} {what}{where}"
            yield Fault(tensor.name, "scale value", text)


def measure(layer: Layer, scales: NDArray[np.float32], advance: Advance) -> Measured:
    """Return the measurements of a layer, whose weight is read some rows at a time."""
    counts = np.zeros(256, np.int64)
    raised = scales.size >= GROUPS_THAT_TELL and are_powers_of_two(scales)
    assert layer.group_shape is not None
    rows, cols = layer.group_shape
    with layer.weight.path.open("rb") as file:
        for matrix in layer.matrices():
            n, k = matrix.shape
            for _, part in read_rows(file, matrix, max(rows, 1), OF_A_COUNT):
                codes = part.view(np.uint8)
                counts += np.bincount(codes.ravel(), minlength=256)
                raised = raised and _full(codes, rows if rows > 0 else n, cols if cols > 0 else k, layer.dtype)
                advance(layer.weight.name, codes.nbytes)
    table = magnitudes(layer.dtype)
    finite = np.isfinite(table)
    with np.errstate(invalid="ignore"):  # the mean of infinity and -infinity
        scale = float(np.median(scales))
    return Measured(layer, int(counts[~finite].sum()), _median(table[finite], counts[finite]), scale, raised)


def _full(codes: NDArray[np.uint8], rows: int, cols: int, dtype: str) -> bool:
    """Return whether every group has a code of the largest magnitude."""
    largest = np.nanmax(np.where(np.isfinite(magnitudes(dtype)), magnitudes(dtype), 0))
    top = magnitudes(dtype)[codes] == largest
    n, k = codes.shape
    across = np.logical_or.reduceat(top, np.arange(0, k, cols), axis=1)
    return bool(np.logical_or.reduceat(across, np.arange(0, n, rows), axis=0).all())


def _median(values: NDArray[np.float32], counts: NDArray[np.int64]) -> float:
    """Return the median of the nonzero values, each repeated as often as its count says."""
    order = np.argsort(values)
    values, counts = values[order], np.where(values[order] > 0, counts[order], 0)
    total = int(counts.sum())
    return float(values[np.searchsorted(np.cumsum(counts), (total + 1) // 2)]) if total else math.nan


def suspicious(measured: Sequence[Measured]) -> Iterator[Fault]:
    """Yield faults of layers whose numbers suggest that the stored scale is not the factor on the codes.

    Weights typically have a magnitude of 1e-3 to 1. If a layer's magnitude is far from that of the other layers (or
    from `USUAL_MEDIAN`, if no layer has a usual magnitude), but near it with the reciprocal or the square root of the
    scale, the scale was probably stored inverted or squared. A weight that decayed in training looks like one with a
    squared scale, so squared scales are reported only if at least half of the layers with the same name (numbers aside)
    look so.
    """
    faults = list(_suspicious(measured))
    alike = Counter(without_numbers(one.layer.name) for one in measured)
    squared = Counter(without_numbers(one.layer.name) for one, fault in faults if fault.kind == "scale squared")
    for one, fault in faults:
        name = without_numbers(one.layer.name)
        if fault.kind != "scale squared" or 2 * squared[name] >= alike[name]:
            yield fault


def _suspicious(measured: Sequence[Measured]) -> Iterator[tuple[Measured, Fault]]:
    known = [one for one in measured if one.magnitude > 0 and math.isfinite(one.magnitude)]
    usual = [one.magnitude for one in known if USUAL[0] <= one.magnitude <= USUAL[1]]
    middle = float(np.median(usual)) if usual else USUAL_MEDIAN
    for one in known:
        name = (one.layer.scale or one.layer.weight).name
        if one.raised:
            text = (
                f"all scales of {name} are powers of two, and every group has the largest code: "
                "they were probably rounded up to powers of two without new codes"
            )
            yield one, Fault(one.layer.weight.name, "scale raised", text)
        if _apart(one.magnitude, middle) < FAR:
            continue
        readings: Mapping[Any, float] = {
            ("scale inverted", "is probably the reciprocal of the scale"): one.code / one.scale,
            ("scale squared", "is probably the square of the scale"): one.code * math.sqrt(one.scale),
        }
        (kind, reading), magnitude = min(readings.items(), key=lambda item: _apart(item[1], middle))
        if _apart(magnitude, middle) <= NEAR:
            text = f"{name} {reading}: weights are typically {one.magnitude:.2g}, and {middle:.2g} in other layers"
            if not usual:
                text = f"{name} {reading}: weights are typically {one.magnitude:.2g}"
            yield one, Fault(one.layer.weight.name, kind, text)


def _apart(one: float, other: float) -> float:
    """Return the ratio of two numbers, the larger over the smaller; infinity if ``one`` is not positive and finite."""
    return max(one / other, other / one) if one > 0 and math.isfinite(one) else math.inf
