"""The suite itself: with a fault planted into the package the soak, or the fuzz, has to say so."""

import threading
from collections import Counter

import numpy as np
import pytest

import fp8core
from fp8core.host import memory
from soak import layers, session, works
from soak.arena import Arena
from soak.machines import Machine, machine
from soak.session import Actor, Budget, Session, WrongNumber
from soak.verdicts import judge

BUDGET = Budget(400, threads=2)


@pytest.fixture
def only_good_moves(monkeypatch):
    """Leave the planted fault alone: what a layer refuses or ignores today has tests of its own."""
    monkeypatch.setattr(layers.MovingLayer, "moved", layers.MovingLayer.rewritten)
    few = works.works(large=False)[::3]
    monkeypatch.setattr(session, "works", lambda **_: few)


def reports(*words: str) -> None:
    """Assert that a soak of NumPy ends with a report that holds these words, the seed and the history."""
    with pytest.raises(WrongNumber) as told:
        Session(machine("numpy"), 5, BUDGET).run()
    for word in (*words, "seed 5", "its last operations:", "python -m tests.soak"):
        assert word in str(told.value)


def test_a_sound_package_passes(only_good_moves):
    counts = Session(machine("numpy"), 5, BUDGET).run()
    assert counts["checks"] > BUDGET.steps
    assert counts["threads"] == BUDGET.threads


def test_a_stale_address(monkeypatch, only_good_moves):
    """A layer that goes on reading the weight which it was made with."""
    call, taken = fp8core.Fp8Linear.__call__, {}

    def stale(self, x, **options):
        if not (
            isinstance(self.weight, np.ndarray) and isinstance(self.weight_scale, np.ndarray)
        ):  # of a call of several frameworks
            return call(self, x, **options)
        kept = taken.setdefault(id(self), (self, fp8core.Fp8Linear(self.weight.copy(), self.weight_scale.copy())))
        return call(kept[1], x, **options)

    monkeypatch.setattr(fp8core.Fp8Linear, "__call__", stale)
    reports("layer of weight")


def test_a_call_that_forgets_how_its_operands_are_aligned(monkeypatch, only_good_moves):
    """Products whose results begin where an aligned one would: eight elements at a time."""
    view = memory.matrix

    def aligned(pointer, dtype, shape, strides):
        return view(pointer // 16 * 16 if dtype == "bfloat16" else pointer, dtype, shape, strides)

    made = Session(machine("numpy"), 5, BUDGET)
    for module in _users_of(view):
        monkeypatch.setattr(module, "matrix", aligned)
    with pytest.raises(WrongNumber, match="bytes are wrong"):
        made.run()


def _users_of(function):
    import sys

    modules = [m for name, m in sys.modules.items() if name.startswith("fp8core.host")]
    return [m for m in modules if getattr(m, "matrix", None) is function]


def test_a_result_that_is_left_unwritten(monkeypatch, only_good_moves):
    """Of each thread's calls into given memory one in twenty that launches nothing: the same ones however threads run."""
    made, asked = Session(machine("numpy"), 5, BUDGET), Counter()
    quantize = fp8core.quantize

    def forgetful(x, *, out=None, **options):
        asked[threading.current_thread().name] += out is not None
        if out is not None and asked[threading.current_thread().name] % 20 == 0:
            return quantize(x, **options)
        return quantize(x, out=out, **options)

    monkeypatch.setattr(fp8core, "quantize", forgetful)
    with pytest.raises(WrongNumber, match="bytes are wrong"):
        made.run()


def test_a_write_beyond_a_result(monkeypatch, only_good_moves):
    """One byte after the rows of a result that the caller gave."""
    scaled_mm_nt = fp8core.scaled_mm_nt

    def greedy(*args, out=None, **options):
        result = scaled_mm_nt(*args, out=out, **options)
        if out is not None:
            np.ndarray((1,), out.dtype, out.base, out.__array_interface__["data"][0] - _start(out.base) + _reach(out))[
                0
            ] = 1
        return result

    monkeypatch.setattr(fp8core, "scaled_mm_nt", greedy)
    with pytest.raises((AssertionError, WrongNumber), match=r"memory around a result|bytes are wrong"):
        Session(machine("numpy"), 5, BUDGET).run()


def _start(base: np.ndarray) -> int:
    return base.__array_interface__["data"][0]


def _reach(x: np.ndarray) -> int:
    return sum((extent - 1) * step for extent, step in zip(x.shape, x.strides, strict=True)) + x.itemsize


def test_an_error_in_a_thread_is_reported_with_its_history(monkeypatch, only_good_moves):
    def broken(self, rng):
        raise IndexError("pop from an empty deque")

    monkeypatch.setattr(Machine, "churn", broken)
    reports("IndexError: pop from an empty deque")


def test_a_planted_error_ends_all_threads(monkeypatch):
    begun = []

    def step(self):
        begun.append(self.number)
        if self.number == 1:
            raise WrongNumber("planted")

    monkeypatch.setattr(Actor, "step", step)
    with pytest.raises(WrongNumber, match="thread 1 of numpy"):
        Session(machine("numpy"), 0, Budget(1, seconds=60.0, threads=3)).run()


def test_a_refusal_that_wrote_before():
    """The judge of the fuzz sees what a refusal has left behind."""
    arena = Arena("numpy")
    place = arena.put(np.ones((2, 8), np.float32))
    arena.seal()

    def writes() -> None:
        arena.array(place)[0, 0] = 7
        raise fp8core.ShapeError("x needs another shape, got this one")

    with pytest.raises(AssertionError, match=r"and yet \d bytes were written"):
        judge(arena, writes, ["x"])


def test_the_answers_are_checked_by_the_oracle():
    """A package that is wrong always is found when the answers are made."""
    work = works.quantization(3, 64, (1, -1), "float8_e4m3fn", "float32")
    wrong = work._replace(call=lambda o, outs, **options: work.call(o | {"x": 2 * o["x"]}, outs, **options))
    with pytest.raises(AssertionError, match="differ"):
        works.Bench(machine("numpy"), wrong)
