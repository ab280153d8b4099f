"""A call of `grouped_scaled_mm_nt` that is good, and the check that a changed one is refused."""

import numpy as np
import pytest

import fp8core
from support.engines import fresh, fresh_fp8, fresh_scale

GROUPS, ROWS, N, K = 3, 6, 32, 64


def good(**changes):
    """Return the arguments of a good call, with changes."""
    return {
        "a": fresh_fp8((ROWS, K)),
        "weight": fresh_fp8((GROUPS, N, K)),
        "scale_a": fresh_scale((ROWS, 1)),
        "scale_b": fresh_scale((GROUPS, N, 1)),
        "offs": np.array([1, 4, 6], np.int32),
        "bias": fresh((GROUPS, N)),
        "out": fresh((ROWS, N)),
        **changes,
    }


def ends(*shape, dtype=np.int32):
    return np.zeros(shape, dtype)


def per_channel(data, shape):
    return fp8core.Quantized(data, fresh_scale(shape), fp8core.PER_CHANNEL)


def check_refused(change, error, message):
    """Check that the good call with ``change`` is refused with this message, and writes nothing."""
    arguments = good(**change())
    before = {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    with pytest.raises(error) as refused:
        fp8core.grouped_scaled_mm_nt(**arguments)
    assert str(refused.value) == message
    assert {name: arguments[name].tobytes() for name in before} == before
