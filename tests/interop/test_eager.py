"""What torch.compile is told about marked functions, against a stand-in for it: all of it, whatever comes between."""

import sys
from threading import Thread
from types import SimpleNamespace

import pytest

from fp8core.interop import eager


class Dynamo:
    """torch.compile's frame evaluation; ``between`` is called once, when it is told of the second function."""

    def __init__(self):
        self.told, self.between = {}, lambda: None
        actions = SimpleNamespace(SKIP="skip", DEFAULT="default")
        self.eval_frame = SimpleNamespace(
            FrameExecStrategy=lambda *actions: actions, FrameAction=actions, set_code_exec_strategy=self.tell
        )

    def tell(self, code, strategy):
        if len(self.told) == 1:
            between, self.between = self.between, lambda: None
            between()
        self.told[code], of_callees = strategy
        assert of_callees == "skip"


@pytest.fixture
def functions(monkeypatch):
    monkeypatch.setattr(eager, "_CODES", {})
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    made = [lambda: 0, lambda: 1, lambda: 2]
    return [eager.eager_only(function) for function in made]


@pytest.fixture
def dynamo(functions, monkeypatch):
    made = Dynamo()
    monkeypatch.setitem(sys.modules, "torch._dynamo", made)
    return made


def test_each_function_is_told_once(dynamo, functions):
    eager.skip_frames()
    assert dynamo.told == {function.__code__: "skip" for function in functions}
    eager.traceable(functions[1])
    assert dynamo.told[functions[1].__code__] == "default"
    assert eager._CODES == {}


def test_torch_before_2_8_has_a_rule_for_the_package_instead(dynamo, functions):
    del dynamo.eval_frame.FrameExecStrategy
    rules = []
    dynamo.trace_rules = SimpleNamespace(add=rules.append)
    eager.skip_frames()
    eager.skip_frames()
    assert (rules, dynamo.told) == (["fp8core"], {})


def test_an_interrupted_telling_is_made_again(dynamo, functions):
    dynamo.between = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        eager.skip_frames()
    eager.skip_frames()
    assert len(dynamo.told) == len(functions)


def test_a_thread_that_compiles_meanwhile_waits_until_all_is_told(dynamo, functions):
    told = []
    other = Thread(target=lambda: (eager.skip_frames(), told.append(len(dynamo.told))), daemon=True)
    dynamo.between = lambda: (other.start(), other.join(0.2))
    eager.skip_frames()
    other.join(30)
    assert told == [len(functions)]


def test_what_becomes_traceable_meanwhile_stays_so(dynamo, functions):
    second = functions[1]
    other = Thread(target=eager.traceable, args=(second,), daemon=True)
    dynamo.between = lambda: (other.start(), other.join(0.2))
    eager.skip_frames()
    other.join(30)
    assert dynamo.told[second.__code__] == "default"


def test_a_module_that_another_thread_is_importing_is_told_later(functions, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo", SimpleNamespace())
    eager.skip_frames()
    later = Dynamo()
    monkeypatch.setitem(sys.modules, "torch._dynamo", later)
    eager.skip_frames()
    assert len(later.told) == len(functions)
