"""What the numbers of an FP8 weight tell of its scales without the weight that it was made from."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8core.checkpoint.faults import Fault
from fp8core.checkpoint.files import read_rows
from fp8core.checkpoint.layers import Layer, Tensor, as_float32
from fp8core.host.codes import decode_table

USUAL: Final = 1e-4, 4.0
"""Between these is the typical magnitude of weights: the median of what their codes that are not zero stand for."""
USUAL_MEDIAN: Final = 2e-2
"""What a typical weight is taken to be where no layer of the checkpoint has a usual magnitude."""
FAR, NEAR = 100.0, 30.0
"""A scale is called wrong where the magnitude is so many times the other layers', and another reading so near them."""
OF_A_COUNT: Final = 8
"""The bytes that NumPy needs to count a code."""
GROUPS_THAT_TELL: Final = 8
"""From so many groups on, powers of two whose largest codes are all the format's largest are no chance."""


class Measured(NamedTuple):
    """What was seen of a layer."""

    layer: Layer
    nans: int
    """Codes that are NaN or infinite."""
    code: float
    """The median magnitude of the codes that are not zero; NaN where all are."""
    scale: float
    """The median scale."""
    raised: bool
    """Whether all scales are powers of two and the largest code of every group is the largest that there is."""

    @property
    def magnitude(self) -> float:
        """What the weight's numbers typically are."""
        return self.code * self.scale


@cache
def magnitudes(dtype: str) -> NDArray[np.float32]:
    """Return the magnitudes of the 256 codes; NaN and infinity where they are that."""
    return np.abs(decode_table(dtype))


def scale_faults(tensor: Tensor) -> Iterator[Fault]:
    """Give what is wrong with the numbers of a scale."""
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


def measure(layer: Layer, scales: NDArray[np.float32]) -> Iterator[Measured | int]:
    """Give how many bytes were read after each piece of a weight, then what was seen."""
    counts = np.zeros(256, np.int64)
    powers = bool(scales.size >= GROUPS_THAT_TELL and (np.frexp(scales)[0] == 0.5).all())
    full = powers
    assert layer.group_shape is not None
    rows, cols = layer.group_shape
    with layer.weight.path.open("rb") as file:
        for matrix in layer.matrices():
            n, k = matrix.shape
            for _, part in read_rows(file, matrix, max(rows, 1), OF_A_COUNT):
                codes = part.view(np.uint8)
                counts += np.bincount(codes.ravel(), minlength=256)
                full = full and _full(codes, rows if rows > 0 else n, cols if cols > 0 else k, layer.dtype)
                yield codes.nbytes
    table = magnitudes(layer.dtype)
    finite = np.isfinite(table)
    yield Measured(
        layer, int(counts[~finite].sum()), _median(table[finite], counts[finite]), float(np.median(scales)), full
    )


def _full(codes: NDArray[np.uint8], rows: int, cols: int, dtype: str) -> bool:
    """Return whether every group has a code of the largest magnitude."""
    largest = np.nanmax(np.where(np.isfinite(magnitudes(dtype)), magnitudes(dtype), 0))
    top = magnitudes(dtype)[codes] == largest
    n, k = codes.shape
    across = np.logical_or.reduceat(top, np.arange(0, k, cols), axis=1)
    return bool(np.logical_or.reduceat(across, np.arange(0, n, rows), axis=0).all())


def _median(values: NDArray[np.float32], counts: NDArray[np.int64]) -> float:
    """Return the median of the values that are not zero, each so many times."""
    order = np.argsort(values)
    values, counts = values[order], np.where(values[order] > 0, counts[order], 0)
    total = int(counts.sum())
    return float(values[np.searchsorted(np.cumsum(counts), (total + 1) // 2)]) if total else math.nan


def suspicious(measured: Sequence[Measured]) -> Iterator[Fault]:
    """Give the layers whose numbers say that the scale is not what multiplies the codes.

    A weight typically has a magnitude of 1e-3 to 1. Where one is far from the others' (or, where no layer is usual,
    from that), and would be near them under the scale's reciprocal or root, that is what the scale is taken to be. A
    weight that training let decay looks like one whose scale is squared: that is told only where half of the layers
    that are called alike look so.
    """
    faults = list(_suspicious(measured))
    alike = Counter(_alike(one.layer) for one in measured)
    squared = Counter(_alike(one.layer) for one, fault in faults if fault.kind == "scale squared")
    for one, fault in faults:
        if fault.kind != "scale squared" or 2 * squared[_alike(one.layer)] >= alike[_alike(one.layer)]:
            yield fault


def _alike(layer: Layer) -> str:
    """Return a layer's name without the numbers of layers and experts."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", layer.name)


def _suspicious(measured: Sequence[Measured]) -> Iterator[tuple[Measured, Fault]]:
    known = [one for one in measured if one.magnitude > 0 and math.isfinite(one.magnitude)]
    usual = [one.magnitude for one in known if USUAL[0] <= one.magnitude <= USUAL[1]]
    middle = float(np.median(usual)) if usual else USUAL_MEDIAN
    for one in known:
        name = (one.layer.scale or one.layer.weight).name
        if one.raised:
            text = (
                f"all scales of {name} are powers of two, and every group has the largest code: "
                "they were probably raised to powers of two while the codes stayed"
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
    """Return how many times one is the other, or the other way around."""
    return max(one / other, other / one) if one > 0 and math.isfinite(one) else math.inf
