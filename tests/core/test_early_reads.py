"""Calls of layers whose weight may be read early, beside other threads that write to it: which launches are made."""

import gc
import threading
import weakref
from contextlib import nullcontext

import pytest

import fp8core
from fp8core import interop
from fp8core.core import prefetch
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.operation import Operation
from fp8core.core.prefetch import WeightHistory
from fp8core.runtime import device

torch = pytest.importorskip("torch")


class Layer:
    """A layer of nothing but a weight, whose calls note which launches they make."""

    def __init__(self, late=lambda: None, early=lambda: None):
        self.weight, self.history, self.made = torch.zeros(8), WeightHistory(), []
        self.places = [0, self.weight.data_ptr(), 0, 0]
        self.spans = [(0, 0), (0, self.weight.nbytes), (0, 0), (0, 0)]
        planned = Planned(self.noted("late", late), prefetching=lambda: self.noted("early", early))
        described = Described({4: NewArray((8,), "float32")}, lambda: planned, lambda: "said")
        self.run = Operation(("x", "weight", "scale", "bias", "out"), lambda *_: described)

    def noted(self, which, then):
        def launch(*addresses):
            self.made.append((which, addresses))
            then()

        return launch

    def __call__(self):
        self.run((torch.zeros(8), self.weight, None, None, None), None, None, self.history)

    def waited(self, stream):
        self.history.waited(stream, self.places, self.spans, self.history.writes)

    def about_to_be_written(self, stream=0):
        return prefetch.announce_write([(self.places[1], self.places[1] + 1)], stream)

    def written(self, stream=0):
        self.about_to_be_written(stream).end()

    @property
    def launches(self):
        return [which for which, _ in self.made]


def writer(launch=lambda *_: None):
    """Return an operation of x that writes an array of its caller."""
    result = {1: NewArray((8,), "float32")}
    return Operation(("x", "out"), lambda *_: Described(result, lambda: Planned(launch), lambda: "said"))


@pytest.fixture
def no_capture(monkeypatch):
    monkeypatch.setattr(device, "capturing", lambda stream: False)


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize("fails", [False, True])
def test_what_waits_on_the_stream_while_a_weight_is_about_to_be_written_is_not_relied_on(fails):
    """On the first call, on one of known signature, and on one that a guard recognizes."""
    layer = Layer()

    def launch(*_):
        layer.waited(7)  # by another thread
        if fails:
            raise fp8core.BackendError("launching failed")

    operation = writer(launch)
    layer.waited(7)
    for _ in range(4):
        assert layer.history.may_prefetch(7, layer.places)
        with pytest.raises(fp8core.BackendError) if fails else nullcontext():
            operation((torch.zeros(8), layer.weight), None)
        assert not layer.history.may_prefetch(7, layer.places)
        layer.waited(7)


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize("calls_before", [0, 1, 2, 4])
def test_calls_with_known_addresses_announce_their_writes_once_a_weight_is_there(calls_before):
    """Each of them, not only the first."""
    layer, x, operation = Layer(), torch.zeros(8), writer()
    for _ in range(calls_before):
        operation((x, layer.weight), None)
    for _ in range(4):
        layer.waited(7)
        assert layer.history.may_prefetch(7, layer.places)
        operation((x, layer.weight), None)
        assert not layer.history.may_prefetch(7, layer.places)


@pytest.mark.usefixtures("no_capture")
def test_new_results_where_a_weight_was_are_announced(monkeypatch):
    """Its memory was freed, and became that of a result."""
    layer, x, operation = Layer(), torch.zeros(8), writer()
    memory = layer.places[1], layer.weight
    monkeypatch.setattr(prefetch, "applies", lambda target: True)
    monkeypatch.setattr(type(interop.framework_of(torch.Tensor)), "allocator", lambda *_: lambda pool: memory)
    for _ in range(4):
        layer.waited(7)
        operation((x, None), None)
        assert not layer.history.may_prefetch(7, layer.places)


@pytest.mark.usefixtures("no_capture")
def test_a_write_whose_launch_failed_has_ended_while_its_error_is_kept():
    """On the first call, and on one of known signature."""

    def launch(*_):
        if fails:
            raise fp8core.BackendError("launching failed")

    layer, x, operation, kept = Layer(), torch.zeros(8), writer(launch), []
    layer.waited(7)
    for fails in (True, False, False, True, True):
        with pytest.raises(fp8core.BackendError) if fails else nullcontext() as failed:
            operation((x, layer.weight), None)
        kept.append(failed)
        assert not layer.history.writing
    assert sum(failed is not None for failed in kept) == 3


@pytest.mark.usefixtures("no_capture")
def test_addresses_beside_weights_are_examined_once(monkeypatch):
    examined, announce = [], prefetch.announce_write

    def counted(written, stream):
        examined.append(written)
        return announce(written, stream)

    monkeypatch.setattr(prefetch, "announce_write", counted)
    layer, x, out, operation = Layer(), torch.zeros(8), torch.zeros(8), writer()
    layer.waited(7)
    for _ in range(2):  # the first call of a kind, and the second, which makes the shortcut
        operation((x, out), None)
    examined.clear()
    for _ in range(4):
        operation((x, out), None)
    assert not examined


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize("writes", ["nothing", "before the launch", "about to"])
def test_a_launch_that_reads_early_is_made_again_if_a_write_has_come_since_that_was_decided(writes):
    """By another thread, between the decision and the launch: then the launch follows the writing kernel."""
    pending = []

    def early():
        if writes != "nothing":
            pending.append(layer.about_to_be_written())
            if writes == "before the launch":
                pending.pop().end()

    layer = Layer(early=early)
    for _ in range(3):
        layer.made.clear()
        layer.waited(0)
        layer()
        assert layer.launches == ["early", *(["late"] if writes != "nothing" else [])]
        assert len({addresses for _, addresses in layer.made}) == 1
        if writes == "about to":
            pending.pop().end()


@pytest.mark.usefixtures("no_capture")
def test_a_weight_is_watched_before_its_first_launch():
    """A write of another thread right after that launch is announced, though the layer was not known before."""
    layer = Layer(late=lambda: layer.written() if len(layer.made) == 1 else None)
    for _ in range(3):
        layer()
    assert layer.launches == ["late", "late", "early"]


def operation_that_writes(launch):
    """An operation with one operand, into an array of the caller."""
    result = {1: NewArray((8,), "float32")}
    return Operation(("x", "out"), lambda *_: Described(result, lambda: Planned(launch), lambda: "said"))


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize("known", [0, 1, 2], ids=["first", "second", "guarded"])
def test_a_layer_that_is_made_while_a_thread_is_past_its_look_for_weights_is_read_late_until_that_has_launched(known):
    """The thread's kernel may come after the layer's first launch, and nothing announces it."""
    looked, go_on, calls = threading.Event(), threading.Event(), []

    def launch(*_):
        calls.append(1)
        if len(calls) > known:
            looked.set()
            assert go_on.wait(30)

    write, out = operation_that_writes(launch), torch.zeros(8)
    for _ in range(known):
        write((torch.zeros(8), out), None)
    layer = Layer()
    layer.weight = out
    layer.places[1] = out.data_ptr()
    thread = threading.Thread(target=write, args=((torch.zeros(8), out), None), daemon=True)
    thread.start()
    assert looked.wait(30)
    layer()
    layer()
    go_on.set()
    thread.join(30)
    assert not thread.is_alive()
    for _ in range(2):
        layer()
    assert layer.launches == ["late", "late", "late", "early"]


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize("out", [None, torch.zeros(8)], ids=["new", "given"])
def test_a_layer_s_own_call_is_none_that_it_waits_for(out):
    layer = Layer()
    for _ in range(3):
        layer.run((torch.zeros(8), layer.weight, None, None, out), None, None, layer.history)
    assert layer.launches == ["late", "early", "early"]


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize("there", [True, False])
def test_a_layer_that_a_destructor_calls_amid_a_write_waits_for_the_write_if_it_is_one_there(there):
    """A thread that writes elsewhere all the time keeps no layer from reading early."""
    layer = Layer()
    write, out = operation_that_writes(lambda *_: layer()), torch.zeros(8)
    for _ in range(2):
        write((torch.zeros(8), layer.weight if there else out), None)
    for _ in range(2):
        layer()
    assert layer.launches == ["late", *(["late", "late"] if there else ["early", "early"]), "early"]


@pytest.mark.usefixtures("no_capture")
def test_a_look_at_the_threads_keeps_nothing_alive():
    """As a frame does that is among its own variables, with all that its callers have."""
    layer = Layer()

    def call():
        kept = torch.zeros(8)
        layer()
        return weakref.ref(kept)

    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("stream", "recorded"), [(0, ["early", "late"]), (8, ["early"])])
def test_a_capture_records_a_launch_again_only_if_the_capture_has_the_write(monkeypatch, stream, recorded):
    """A write of a stream that is not captured does not concern the replays, which would make both launches."""
    monkeypatch.setattr(prefetch, "capture_of", lambda of: 3 if of == 0 else 0)
    layer = Layer(early=lambda: layer.written(stream))
    layer.history.move_to(layer.places, layer.spans, 0)
    layer()
    assert layer.launches == recorded
