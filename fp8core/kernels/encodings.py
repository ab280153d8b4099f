"""The numbers of formats and dtypes in device sources, and the arithmetic of launch sizes."""

from typing import Final

from fp8core.dtypes import FORMATS, HIGH_PRECISION
from fp8core.problem import PER_TENSOR, PER_TOKEN, Activation, NormQuantize, Quantize, SiluQuantize
from fp8core.runtime.limits import SCRATCH_ALIGNMENT

FORMAT: Final = {"float8_e4m3fn": 0, "float8_e4m3fnuz": 1, "float8_e5m2": 2, "float8_e5m2fnuz": 3}
"""The template argument FORMAT."""
TYPE: Final = {"float32": 0, "float16": 1, "bfloat16": 2}
"""The template argument INPUT (or OUT, BIAS) of a high-precision dtype."""
RESULT: Final = {**{name: TYPE[name] for name in HIGH_PRECISION}, **{name: 3 + FORMAT[name] for name in FORMATS}}
"""The template argument of a result, high-precision or FP8."""
ACTIVATION: Final[dict[Activation, int]] = {"": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3}
"""The template argument ACTIVATION."""
SCALE_FORMAT: Final = {"float32": 0, "ue8m0": 1, "ue8m0_bytes": 2}
"""The template argument SCALE_FORMAT: how scales are stored."""
STATIC, TENSOR, TOKEN, GROUP = range(4)
"""The template argument MODE: the origin of a scale, each with its own formula."""


def mode_of(problem: Quantize | NormQuantize | SiluQuantize) -> int:
    """Return the mode of a quantization."""
    if problem.static:
        return STATIC
    return {PER_TENSOR: TENSOR, PER_TOKEN: TOKEN}.get(problem.group_shape, GROUP)


def ceil_div(count: int, size: int) -> int:
    """Return how many pieces of ``size`` cover ``count``."""
    return -(-count // size)


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is not below ``number``."""
    return -(-number // multiple) * multiple


def scratch_part(nbytes: int) -> int:
    """Return how many bytes of a scratch a part of ``nbytes`` takes, so that the next part is aligned, too."""
    return round_up(nbytes, SCRATCH_ALIGNMENT)


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def column_tiling(units: int, most: int) -> tuple[int, int]:
    """Return a number of threads along a row of ``units``, and the column tiles that they have.

    Threads are a power of two from 8 to ``most``, of which few are idle. A row without units has a tile, too.
    """
    across = most
    while across > 8 and (ceil_div(units, across) * across > units * 9 / 8):
        across //= 2
    return across, max(1, ceil_div(units, across))
