"""Arrays that only DLPack orders: the stream of a launch waits for them, and no other, which a capture would not allow."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

import fp8core
from fp8core import interop
from fp8core.core.operation import Operation
from fp8core.errors import DeviceError, LayoutError
from fp8core.interop import LaunchStream, cupy_arrays, dlpack, dlpack_capsule
from fp8core.runtime import device, streams
from support.targets import AMPERE

TARGET = AMPERE
CURRENT, CAPTURED = 0, 0xC00
CUPYS = SimpleNamespace(ptr=CURRENT)
"""CuPy's current stream."""
ENTERED = [None]
"""The devices that were made current, the last one is."""


class Exporter:
    """An array on a GPU that offers DLPack, and logs the numbers of the streams that it was exported for.

    It is to be exported with its device current: JAX makes it current, and does not restore the one before.
    """

    def __init__(self, shape=(4, 32), ordinal=TARGET.device):
        self.array, self.ordinal, self.streams = np.ones(shape, np.float32), ordinal, []

    def __dlpack_device__(self):
        return dlpack.CUDA, self.ordinal

    def __dlpack__(self, *, stream=None, **options):
        assert ENTERED[-1] == self.ordinal
        self.streams.append(stream)
        capsule = self.array.__dlpack__(**options)
        tensor = dlpack.managed(capsule).tensor
        tensor.device_type, tensor.device_id = dlpack.CUDA, self.ordinal
        return capsule


class Planned(Exception):
    """Raised in place of planning a call: all of its operands have been viewed."""


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there are GPUs, on which CuPy's current stream is the default one."""

    @contextmanager
    def on(ordinal):
        ENTERED.append(ordinal)
        yield
        ENTERED.pop()

    monkeypatch.setattr(device, "target", lambda ordinal: TARGET._replace(device=ordinal))
    monkeypatch.setattr(device, "current", lambda: TARGET.device)
    monkeypatch.setattr(device, "on", on)
    monkeypatch.setattr(device, "stream", lambda ordinal=-1: CURRENT)
    monkeypatch.setattr(device, "current_stream", lambda ordinal=-1: CUPYS)
    monkeypatch.setattr(device, "capturing", lambda stream: stream >= CAPTURED)
    monkeypatch.setattr(streams, "event_query", lambda stream, ordinal: None)


def planned(monkeypatch, function, *arguments, **options):
    """Make a call up to its plan."""

    def stop(*_):
        raise Planned

    monkeypatch.setattr(Operation, "_planned", stop)
    with pytest.raises(Planned):
        function(*arguments, **options)


def test_only_the_given_stream_waits_for_the_operands_of_a_call(gpu, monkeypatch):
    x, scale = Exporter(), Exporter((1,))
    planned(monkeypatch, fp8core.quantize, x, scale=scale, group_shape=fp8core.PER_TENSOR, stream=CAPTURED)
    assert (x.streams, scale.streams) == ([CAPTURED], [CAPTURED])


def test_without_a_stream_cupys_current_one_waits(gpu, monkeypatch):
    x, scale = Exporter(), Exporter((1,))
    planned(monkeypatch, fp8core.quantize, x, scale=scale, group_shape=fp8core.PER_TENSOR)
    assert (x.streams, scale.streams) == ([1], [1]), "the default stream's number in DLPack"


def test_a_view_for_the_stream_of_the_launch_is_exported_once(gpu):
    x, stream = Exporter(), SimpleNamespace(ptr=CAPTURED)
    seen = interop.view(x, "x", LaunchStream(stream))
    assert interop.stream_of(seen, stream) == CAPTURED
    interop.order_before(CAPTURED, [seen], stream)
    assert x.streams == [CAPTURED]
    assert (seen.held.stream, seen.held.stream_owner) == (CAPTURED, stream)


def test_the_stream_of_the_first_operands_framework_waits(gpu):
    launch = LaunchStream()
    launch.first = SimpleNamespace(target=TARGET, framework=SimpleNamespace(stream=lambda target: CAPTURED))
    x = Exporter()
    assert interop.view(x, "x", launch).held.stream == CAPTURED
    assert x.streams == [CAPTURED]


def test_an_operand_on_another_device_is_viewed_on_its_own_stream(gpu):
    """It is refused later: the export must not name a stream of another device."""
    launch = LaunchStream()
    launch.first = SimpleNamespace(target=TARGET, framework=SimpleNamespace(stream=lambda target: CAPTURED))
    x = Exporter(ordinal=TARGET.device + 1)
    assert interop.view(x, "x", launch).target.device == TARGET.device + 1
    assert x.streams == [1]


def test_what_is_no_stream_is_refused_before_the_export(gpu):
    x = Exporter()
    with pytest.raises(DeviceError, match="stream needs an address or an object"):
        fp8core.quantize(x, stream="0")
    assert x.streams == []


def test_an_explanation_orders_the_given_stream(gpu):
    x = Exporter()
    fp8core.explain(fp8core.quantize, x, stream=CAPTURED)
    assert x.streams == [CAPTURED]


def test_a_view_by_itself_is_ordered_by_the_launch(gpu):
    """Its capsule is kept until that stream has passed, which must not be destroyed before."""
    x, stream = Exporter(), SimpleNamespace(ptr=CAPTURED)
    seen = interop.view(x, "x")
    assert (seen.held.stream, seen.held.stream_owner) == (CURRENT, CUPYS)
    assert interop.stream_of(seen, stream) == CAPTURED
    assert x.streams == [1, CAPTURED]
    assert (seen.held.stream, seen.held.stream_owner) == (CAPTURED, stream)
    assert dlpack_capsule.framework().stream(TARGET) == CURRENT


def test_a_result_is_allocated_for_the_stream_of_the_launch(gpu, monkeypatch):
    monkeypatch.setattr(cupy_arrays, "framework", lambda: SimpleNamespace(empty=lambda *given: given))
    given = (4, 32), "float32", TARGET, (1, 4), CAPTURED
    assert dlpack_capsule.framework().empty(*given) == given


def test_memory_of_the_host_is_not_read_as_that_of_a_gpu(gpu):
    class Liar(Exporter):
        def __dlpack__(self, *, stream=None, **options):
            return self.array.__dlpack__(**options)

    with pytest.raises(LayoutError, match="it reports CUDA, but exports memory of CPU"):
        interop.view(Liar(), "x")


def test_the_default_stream_is_given_like_any_other(gpu, monkeypatch):
    monkeypatch.setattr(device, "stream", lambda ordinal=-1: CAPTURED)
    x = Exporter()
    interop.view(x, "x", LaunchStream(0))
    assert x.streams == [1]
