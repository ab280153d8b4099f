"""How many kinds of eager calls are kept, and what of calls that cannot be."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import fp8core  # noqa: E402 - after the skip
import fp8core.jax  # noqa: E402
from fp8core.jax import calls  # noqa: E402
from fp8core.ops.quantize import quantize_operation  # noqa: E402
from jax_ffi.cases import cpu, same  # noqa: E402, F401


@pytest.fixture
def kept(monkeypatch):
    """Return both of the dictionaries, empty, with room for four kinds."""
    both = calls._Kept(), calls._Kept()
    monkeypatch.setattr(calls, "_KINDS", both[0])
    monkeypatch.setattr(calls, "_EAGER", both[1])
    monkeypatch.setattr(calls, "CALLS_KEPT", 4)
    return both


def test_kinds_are_bounded_and_results_stay_right(kept):
    for rows in (*range(1, 11), *range(1, 11)):
        x = np.linspace(-3, 5, rows * 32, dtype=np.float32).reshape(rows, 32)
        got, wanted = fp8core.quantize(jnp.asarray(x)), fp8core.quantize(x)
        assert same(tuple(got), tuple(wanted))
        assert all(0 < len(one) <= 4 for one in kept)


def test_the_first_of_two_threads_is_kept(kept):
    for one in kept:
        first, second = object(), object()
        assert one.keep("key", first) is first
        assert one.keep("key", second) is first


def test_what_cannot_be_hashed_is_not_kept(kept):
    operation, x = quantize_operation("x"), object()
    key = operation, ([],), x
    for one in kept:
        assert one.keep(key, x) is x
        assert not one
