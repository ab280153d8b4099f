"""Operands of equal signature are recognized, and never others, whatever changed about them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import fp8core
from fp8core import interop
from fp8core.core import signature
from fp8core.core.calls import GUARDS_PER_SIZE, CallCache
from fp8core.errors import LayoutError
from fp8core.interop import torch_tensors

torch = pytest.importorskip("torch")


def matrix(rows=4, cols=32, dtype=torch.bfloat16):
    return torch.arange(rows * cols, dtype=torch.float32).reshape(rows, cols).to(dtype)


_CACHE = CallCache()


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    """The calls of one operation, which `number` asks as a call does."""
    made = CallCache()
    monkeypatch.setattr(sys.modules[__name__], "_CACHE", made)
    return made


def found_by(*operands):
    """Return the addresses and the calls that operands find: by a guard, else by their signature."""
    size = getattr(operands[0], "nbytes", None)
    for read, calls in _CACHE.guards.get(size, ()):
        found = read(*operands)
        if found is not None:
            return found[0], calls
    found, calls = _CACHE.unguarded(operands)
    return (None, None) if found is None else (found[0], calls)


def number(*operands):
    """Return what is equal for operands of equal signature, and None where they have to be viewed each time."""
    calls = found_by(*operands)[1]
    return None if calls is None else id(calls)


CHANGES = {
    "shape": lambda x: x[:2],
    "strides": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "order": lambda x: x.t(),
    "dtype": lambda x: x.to(torch.float16),
    "axes": lambda x: x[None],
    "type and grad": torch.nn.Parameter,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("place", [0, 1])
def test_operands_that_changed_are_not_taken_for_what_they_were(change, place):
    pair = [matrix(), matrix()]
    before = [number(*pair) for _ in range(3)]
    assert len(set(before)) == 1
    assert number(matrix(), matrix()) == before[0]
    changed = [change(x) if i == place else x for i, x in enumerate(pair)]
    # torch.nn.Parameter is read like any tensor: it may share the number, and the guard.
    assert (number(*changed) == before[0]) == (change is torch.nn.Parameter)


def test_torch_has_the_guards_that_signatures_are_recognized_by():
    assert interop.framework_of(torch.Tensor).address is torch.Tensor.data_ptr


def test_without_guards_signatures_are_read_one_by_one(monkeypatch, cache):
    pair = matrix(3), matrix(5)
    before = number(*pair)
    monkeypatch.setattr(interop.framework_of(torch.Tensor), "address", None)
    cache.guards.clear()
    cache._by_number.clear()
    assert [number(*pair) for _ in range(2)] == [before, before]
    assert not cache.guards


@pytest.mark.parametrize("guards", [None, object(), lambda *_, **__: pytest.fail, int])
def test_guards_that_are_not_what_they_were_are_not_used(guards):
    changed = SimpleNamespace(_C=SimpleNamespace(_dynamo=SimpleNamespace(guards=SimpleNamespace(TensorGuards=guards))))
    for name in ("zeros", "empty", "nn"):
        setattr(changed, name, getattr(torch, name))
    assert torch_tensors._guards(changed) is None


@pytest.mark.parametrize("method", ["resize_", "t_", "data"])
def test_a_tensor_changed_in_place_is_another(method):
    x = matrix(8, 8)
    before = number(x, None)
    assert number(x, None) == before
    if method == "resize_":
        x.resize_(4, 8)
    elif method == "t_":
        x.t_()
    else:
        x.data = matrix(8, 16)
    assert number(x, None) != before


def test_an_operand_left_out_counts():
    x, y = matrix(), matrix()
    found = {number(x, None, None), number(x, y, None), number(x, None, y), number(x, y, y)}
    assert len(found) == 4
    assert found_by(x, None, y)[0] == [x.data_ptr(), 0, y.data_ptr()]
    assert found_by(x, None, y)[0] == [x.data_ptr(), 0, y.data_ptr()]


def test_modes_of_torch_do_not_change_signatures():
    x = matrix()
    with torch.inference_mode():
        inside = number(x, None)
    with torch.autocast("cpu"):
        cast = number(x, None)
    assert inside == cast == number(x, None)


def test_memory_that_was_taken_away_is_refused():
    x = matrix()
    for _ in range(3):
        fp8core.quantize(x)
    x.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="needs memory of its own"):
        fp8core.quantize(x)


def test_more_weights_than_guards_are_kept_for_one_input(cache):
    x = matrix(2, 32)
    weights = [matrix(rows) for rows in range(1, GUARDS_PER_SIZE + 4)]
    numbers = [number(x, w) for w in weights]
    assert len(set(numbers)) == len(weights)
    assert [number(x, w) for w in weights] == numbers
    assert len(cache.guards[x.nbytes]) == GUARDS_PER_SIZE


@pytest.mark.parametrize("offsets", [(0, 0), (2, 0), (0, 8), (16, 48)])
def test_a_guard_reads_addresses_and_their_low_bits(offsets, cache):
    memory = [torch.zeros(256, dtype=torch.uint8) for _ in offsets]
    x, y = (m[-m.data_ptr() % 64 + at :][:128].view(torch.float16) for m, at in zip(memory, offsets, strict=True))
    for _ in range(2):
        assert found_by(x, None, y, None)[0] == [x.data_ptr(), 0, y.data_ptr(), 0]
    ((read, _calls),) = cache.guards[x.nbytes]
    assert read(x, None, y, None) == ([x.data_ptr(), 0, y.data_ptr(), 0], (offsets[0] | offsets[1]) & 31)
    assert read(x, y, None, None) is None
    assert read(x, None, y, y) is None


def test_results_follow_the_values_and_not_the_call_before():
    x, y = matrix(), -matrix()
    for operand in (x, y, x):
        data, scale = fp8core.quantize(operand)
        assert torch.allclose(data.float() * scale, operand.float(), rtol=0.07)


def test_operands_of_two_frameworks_are_viewed_each_time():
    assert number(matrix(), np.ones(3)) is None


def test_operands_of_two_frameworks_that_have_signatures_are_viewed_each_time(monkeypatch):
    class Other:
        nbytes, address = 8, None

    monkeypatch.setitem(signature._READERS, Other, lambda _: (64, "as ever"))
    frameworks = {torch.Tensor: interop.framework_of(torch.Tensor), Other: Other}
    monkeypatch.setattr(signature, "framework_of", frameworks.get)
    assert number(Other()) == number(Other()) is not None
    assert [number(*pair) for pair in [(matrix(), Other()), (Other(), matrix())] for _ in range(2)] == [None] * 4
