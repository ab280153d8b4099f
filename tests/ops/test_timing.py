"""The stopwatch: turns and stretches without a GPU, and captures that end whatever happens, with and without one."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

import fp8core
from fp8core import timing
from fp8core.errors import TuningError
from fp8core.runtime import device
from support.blaslt_tools import problem
from support.engines import fresh


def test_turns_interleave_and_stretches_last():
    asked, runs = [], {"short": object(), "long": object()}
    names = {id(run): name for name, run in runs.items()}
    one = {"short": 0.25, "long": 3.0}

    def elapsed(run, rounds):
        asked.append((names[id(run)], rounds))
        return one[names[id(run)]]

    found = timing.interleaved(runs, elapsed, turns=5, stretch_ms=1.0)
    assert found == {name: [ms] * 5 for name, ms in one.items()}
    rounds = {name: [n for other, n in asked if other == name] for name in runs}
    assert rounds == {"short": [1, 5, *[5] * 5], "long": [1] * 7}
    pairs = [{name for name, _ in asked[i : i + 2]} for i in range(0, len(asked), 2)]
    assert pairs == [{"short", "long"}] * 7
    assert len({tuple(name for name, _ in asked[i : i + 2]) for i in range(0, len(asked), 2)}) == 2


def test_a_stopwatch_times_all_rounds_and_tells_the_time_of_one(monkeypatch):
    seen = []

    class Event:
        def record(self, stream):
            seen.append((self, stream))

        def synchronize(self):
            seen.append((self, "waited"))

    def between(begin, end):
        assert [event for event, _ in seen if event is not None] == [begin, end, end]
        return 6.0

    cuda = SimpleNamespace(Stream=lambda non_blocking: ("stream", non_blocking), Event=Event, get_elapsed_time=between)
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=cuda))
    watch = timing.Stopwatch()
    assert watch.elapsed(lambda: seen.append((None, "run")), 3) == 2.0
    assert [what for _, what in seen] == [("stream", True), *["run"] * 3, ("stream", True), "waited"]


class CaptureError(Exception):
    pass


class Stream:
    """A stream of CuPy's as `captured` uses it; ``valid`` tells whether a capture may end without an error."""

    ptr = 7

    def __init__(self, valid=True):
        self.capturing, self.valid = False, valid

    def begin_capture(self):
        self.capturing = True

    def end_capture(self):
        self.capturing = False
        if not self.valid:
            raise CaptureError
        return "graph"


@pytest.fixture
def fake(monkeypatch):
    def stream(valid):
        made = Stream(valid)
        monkeypatch.setattr(device, "capturing", lambda pointer: made.capturing)
        runtime = SimpleNamespace(CUDARuntimeError=CaptureError)
        monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
        return made

    return stream


def failing(error):
    def calls():
        raise error

    return calls


class Memory:
    """Memory of no device, at addresses of its own."""

    made: ClassVar[list["Memory"]] = []

    def __init__(self, nbytes):
        self.ptr = (self.made[-1].end + 0xFFFF) & ~0xFF if self.made else 1 << 20
        self.end = self.ptr + nbytes
        self.made.append(self)


@pytest.fixture
def memory(monkeypatch):
    runtime = SimpleNamespace(memcpy=lambda *_: None, memcpyHostToDevice=1, memcpyDeviceToDevice=3)
    cuda = SimpleNamespace(Memory=Memory, runtime=runtime)
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(Memory, "made", [])
    return lambda begin, end: any(one.ptr <= begin and end <= one.end for one in Memory.made)


@pytest.mark.parametrize("lda", [0, 16, 512, 528])
def test_rows_that_overlap_lie_in_memory(memory, lda):
    """As those of an expanded array."""
    p = problem(m=96, k=512, lda=lda, ldb=512)
    first = timing.Operands(p, 0)._a
    assert memory(first, first + 95 * lda + 512)


@pytest.mark.parametrize("of_b", [(4, 1), (-4, 1), (4, -1), (-4, -1), (1, -200), (0, 0)], ids=str)
@pytest.mark.parametrize("of_a", [(4, 1), (-4, -1)], ids=str)
def test_scales_in_any_order_lie_in_memory_of_their_own(memory, of_a, of_b):
    """CuPy's arrays may be reversed, and so the scales of a product that is tuned."""
    p = problem(m=96, k=512, scale_a="group", scale_b="group", lda=512, ldb=512, vectors_alignment=4)
    p = p._replace(scale_a_strides=of_a, scale_b_strides=of_b)
    for rows, strides, address in zip((p.m, p.n), (of_a, of_b), timing.Operands(p, 0)._vectors[:2], strict=True):
        assert address % 256 == 4
        reached = [address + 4 * (row * strides[0] + block * strides[1]) for row in (0, rows - 1) for block in (0, 3)]
        assert memory(min(reached), max(reached) + 4)


@pytest.mark.parametrize(("vectors", "own", "of_a"), [(16, 1, 0), (4, 1, 4), (4, 8, 8), (4, 16, 0), (8, 4, 8)])
def test_scales_of_a_may_be_better_aligned_than_the_other_vectors(memory, vectors, own, of_a):
    p = problem(m=96, k=512, scale_a="group", scale_b="block", lda=512, ldb=512, vectors_alignment=vectors)
    scale_a, scale_b, _ = timing.Operands(p._replace(scale_a_alignment=own), 0)._vectors
    assert (scale_a % 256, scale_b % 256) == (of_a, vectors % 16)


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_capture_ends(fake, error, valid):
    stream = fake(valid)
    with pytest.raises(error):
        timing.captured(stream, failing(error))
    assert not stream.capturing


def test_a_capture_gives_its_graph_and_tells_its_own_error(fake):
    assert timing.captured(fake(True), lambda: None) == "graph"
    stream = fake(False)
    with pytest.raises(CaptureError):
        timing.captured(stream, lambda: None)
    assert not stream.capturing


# ---- on the device


@pytest.fixture
def cp():
    return pytest.importorskip("cupy")


@pytest.mark.gpu
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_capture_leaves_its_stream_as_it_was(cp, error):
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        x = cp.zeros(16)

    def calls():
        with stream:
            cp.add(x, 1, out=x)
        raise error

    with pytest.raises(error):
        timing.captured(stream, calls)
    assert not stream.is_capturing()
    with stream:
        cp.add(x, 1, out=x)
    stream.synchronize()
    assert (x == 1).all()  # what was captured has not run


@pytest.mark.gpu
def test_tune_in_a_capture_is_refused_and_the_capture_goes_on(cp):
    x, weight = cp.asarray(fresh((4, 256), "float32")), cp.asarray(fresh((64, 256), "float32"))
    layer = fp8core.Fp8Linear.from_weight(weight, out_dtype="float32")
    layer(x)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        y = cp.zeros(16)
        stream.begin_capture()
        cp.add(y, 1, out=y)
        with pytest.raises(TuningError, match="needs streams that are not being captured"):
            fp8core.tune(layer, x)
        assert stream.is_capturing()
        cp.add(y, 1, out=y)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert (y == 2).all()


@pytest.mark.gpu
def test_tune_in_a_capture_of_torch_is_refused_and_the_capture_goes_on():
    torch = pytest.importorskip("torch")
    weight, x = torch.randn(64, 256, device="cuda"), torch.randn(4, 256, device="cuda")
    layer, y = fp8core.Fp8Linear.from_weight(weight, out_dtype="float32"), torch.zeros(16, device="cuda")
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y += 1
        with pytest.raises(TuningError, match="needs streams that are not being captured"):
            fp8core.tune(layer, x)
        y += 1
    graph.replay()
    torch.cuda.synchronize()
    assert bool((y == 2).all())
