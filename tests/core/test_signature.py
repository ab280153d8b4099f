"""Operands of equal signature are recognized, and never others, whatever changed about them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import fp8core
from fp8core import interop
from fp8core.core import signature
from fp8core.core.calls import SHORTCUTS_PER_SIZE, CallCache
from fp8core.dtypes import FORMATS
from fp8core.errors import LayoutError
from fp8core.interop import torch_tensors
from support.probe import Probe

torch = pytest.importorskip("torch")


def matrix(rows=4, cols=32, dtype=torch.bfloat16):
    return torch.arange(rows * cols, dtype=torch.float32).reshape(rows, cols).to(dtype)


@pytest.fixture(autouse=True)
def probes(monkeypatch):
    """Probes by how many operands they take, which `number` asks."""
    made = {}
    monkeypatch.setattr(sys.modules[__name__], "_PROBES", made)
    return made


_PROBES: dict[int, Probe] = {}


def probe(count):
    return _PROBES.setdefault(count, Probe(count))


def number(*operands):
    """Return what is equal for operands of equal signature."""
    return probe(len(operands))(*operands)[0]


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


def test_without_guards_signatures_are_read_one_by_one(monkeypatch, probes):
    monkeypatch.setattr(interop.framework_of(torch.Tensor), "_guards", lambda: None)
    pair = matrix(3), matrix(5)
    before = number(*pair)
    assert [number(*pair) for _ in range(3)] == [before] * 3
    assert not probes[2].shortcuts(pair[0])


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
    for _ in range(4):
        assert probe(3)(x, None, y)[1] == [x.data_ptr(), 0, y.data_ptr()]


def test_a_number_is_never_given_twice(monkeypatch):
    monkeypatch.setattr(signature, "NUMBERS_KEPT", 3)
    numbers = [signature.signature([matrix(rows)])[1] for rows in range(1, 20)]
    assert len(set(numbers)) == len(numbers)
    assert len(signature._NUMBERS) <= 3


def test_bytes_of_two_formats_have_two_signatures(monkeypatch):
    monkeypatch.setitem(signature._READERS, np.ndarray, lambda _: (64, "bytes"))  # as CuPy's have one
    codes = np.zeros((4, 32), np.uint8)
    arrays = [fp8core.Float8Array(codes, dtype) for dtype in FORMATS]
    seen = [signature._READERS[type(x)](x) for x in arrays]
    assert {pointer for pointer, _ in seen} == {64}
    assert len({one for _, one in seen}) == len(FORMATS)


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


def test_more_weights_than_shortcuts_are_kept_for_one_input():
    x = matrix(2, 32)
    weights = [matrix(rows) for rows in range(1, SHORTCUTS_PER_SIZE + 4)]
    numbers = [[number(x, w) for _ in range(3)][-1] for w in weights]
    assert len(set(numbers)) == len(weights)
    assert [number(x, w) for w in weights] == numbers
    assert len(probe(2).shortcuts(x)) == SHORTCUTS_PER_SIZE


@pytest.mark.parametrize("offsets", [(0, 0), (2, 0), (0, 8), (16, 48)])
def test_a_shortcut_takes_operands_of_its_offsets(offsets):
    memory = [torch.zeros(256, dtype=torch.uint8) for _ in offsets]
    starts = [-m.data_ptr() % 64 for m in memory]

    def at(*places):
        return [m[start + at :][:128].view(torch.float16) for m, start, at in zip(memory, starts, places, strict=True)]

    x, y = at(*offsets)
    run = probe(4).shortcut(x, None, y, None)
    for _ in range(2):
        assert run(x, None, y, None)[1] == [x.data_ptr(), 0, y.data_ptr(), 0]
    assert run(x, y, None, None) is None
    assert run(x, None, y, y) is None
    for changed in ((4, 0), (0, 4), (4, 4), (16, 16)):
        z, w = at(*[one ^ other for one, other in zip(offsets, changed, strict=True)])
        assert run(z, None, w, None) is None
        assert probe(4)(z, None, w, None)[1] == [z.data_ptr(), 0, w.data_ptr(), 0]
    z, _ = at(offsets[0] ^ 32, 0)  # another multiple of the alignment further
    assert run(z, None, y, None)[1] == [z.data_ptr(), 0, y.data_ptr(), 0]


def test_a_shortcut_examines_where_results_are_given():
    x = matrix(4, 32)
    data, scale = torch.zeros((4, 32), dtype=torch.uint8), torch.zeros((4, 1))  # of one alignment with x
    out = data.view(torch.float8_e4m3fn), scale
    for _ in range(3):
        fp8core.quantize(x, out=out)
    inside = x.view(torch.float8_e4m3fn)[:, :32].as_strided((4, 32), (32, 1))
    before = x.clone()
    with pytest.raises(LayoutError, match="overlaps x"):
        fp8core.quantize(x, out=(inside, scale))
    assert torch.equal(x, before)


def test_results_follow_the_values_and_not_the_call_before():
    x, y = matrix(), -matrix()
    for operand in (x, y, x):
        data, scale = fp8core.quantize(operand)
        assert torch.allclose(data.float() * scale, operand.float(), rtol=0.07)


def test_operands_of_two_frameworks_are_viewed_each_time():
    assert CallCache().of_signature((matrix(), np.ones(3))) is None


def test_operands_of_two_frameworks_that_have_signatures_are_viewed_each_time(monkeypatch):
    class Other:
        nbytes, address = 8, None

    monkeypatch.setitem(signature._READERS, Other, lambda _: (64, "as ever"))
    frameworks = {torch.Tensor: interop.framework_of(torch.Tensor), Other: Other}
    monkeypatch.setattr(signature, "framework_of", frameworks.get)
    monkeypatch.setattr(signature, "owner_of", lambda x: (x, frameworks[type(x)]))
    cache = CallCache()
    assert cache.of_signature((Other(),))[1] is cache.of_signature((Other(),))[1]
    assert [cache.of_signature(pair) for pair in [(matrix(), Other()), (Other(), matrix())] * 2] == [None] * 4


def test_results_that_require_grad_are_refused_where_a_call_is_cached():
    codes, out = fp8core.quantize(matrix()), matrix(dtype=torch.float32)
    for _ in range(3):
        fp8core.dequantize(codes, out=out)
    leaf = matrix(dtype=torch.float32).requires_grad_()
    for _ in range(2):
        with pytest.raises(LayoutError, match="out needs a tensor that does not require grad"):
            fp8core.dequantize(codes, out=leaf)
