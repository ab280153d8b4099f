"""ROCm below interop, without an AMD GPU: the runtime in the process, streams, and graphs."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8core import timing
from fp8core.errors import BackendError, DeviceError
from fp8core.runtime import capture, device, hip_graphs, loaded, streams
from support.rocm import HIP, Event, cupy, launcher, libraries, rocm  # noqa: F401
from support.targets import MI300

# the runtime in the process


def maps(monkeypatch, tmp_path, *paths):
    listing = tmp_path / "maps"
    lines = [f"7f00{i:04x}000-7f00{i:04x}fff r-xp 00000000 08:01 {i} {' ' * 20}{p}" for i, p in enumerate(paths)]
    listing.write_text("\n".join(["7ffc0000-7ffd0000 rw-p 00000000 00:00 0 [stack]", "55-56 rw-p 0 00:00 0", *lines]))
    monkeypatch.setattr(loaded, "MAPS", listing)


def test_the_mapped_runtime_is_the_driver(cupy, libraries, monkeypatch, tmp_path):
    path = libraries["7"]._name
    others = "/opt/rocm/lib/libamdhip64_extra.so", "/opt/rocm/lib/libamdhip64.so.7.debug"
    maps(monkeypatch, tmp_path, f"{path} (deleted)")  # an upgrade has replaced the file
    assert loaded.hip_runtime() == Path(path)
    maps(monkeypatch, tmp_path, "/usr/lib/libc.so.6", path, path, *others)
    assert loaded.hip_runtime() == Path(path)
    assert device.driver()._name == path


def test_two_hip_runtimes_are_refused_in_words(cupy, monkeypatch, tmp_path):
    two = "/opt/rocm-7.0.0/lib/libamdhip64.so.7.0.70000", "/venv/torch/lib/libamdhip64.so"
    maps(monkeypatch, tmp_path, *two)
    with pytest.raises(DeviceError, match=f"a process needs one HIP runtime, got 2: {two[0]}, {two[1]}"):
        device.driver()


def test_a_runtime_that_came_with_torch_later_is_refused_with_its_first_tensor(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    from fp8core.interop import torch_tensors

    target, tensor = object(), SimpleNamespace(is_cuda=True, is_cpu=False, get_device=lambda: 0)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(device, "target", lambda ordinal: target)
    loaded.refuse_second_hip_runtime.cache_clear()
    two = "/opt/rocm-7.0.0/lib/libamdhip64.so.7.0.70000", "/venv/torch/lib/libamdhip64.so"
    maps(monkeypatch, tmp_path, *two)
    for _ in range(2):
        with pytest.raises(DeviceError, match=f"a process needs one HIP runtime, got 2: {two[0]}, {two[1]}"):
            torch_tensors.framework()._target(tensor, "x")
    maps(monkeypatch, tmp_path, two[1])
    assert torch_tensors.framework()._target(tensor, "x") is target
    loaded.refuse_second_hip_runtime.cache_clear()


def test_without_a_list_of_what_is_mapped_the_names_decide(cupy, monkeypatch, tmp_path):
    monkeypatch.setattr(loaded, "MAPS", tmp_path / "absent")
    assert loaded.hip_runtime() is None
    assert loaded.mapped("libm") == ()


def test_what_this_process_has_mapped_is_found():
    ctypes.CDLL("libm.so.6")
    assert len(loaded.mapped("libm")) == 1


# streams


@pytest.mark.parametrize(("state", "captured"), [(0, False), (1, True), (2, True)])
def test_whether_a_stream_is_captured_is_asked_of_the_driver(rocm, state, captured):
    rocm.stub_set(0, state)
    assert device.capturing(0x7000) is captured
    assert rocm.stub_log() == b"capturing 0x7000\n"


def test_streams_wait_for_each_other_unless_they_are_captured(rocm):
    streams.join(0x7000, 0x8000, 0)
    assert Event.made == 1
    assert streams.event_query(0x7000, 0)() is True
    rocm.stub_set(0, 1)
    Event.made = 0
    streams.join(0x7000, 0, 0)
    streams.join(0, 0x7000, 0)
    assert streams.event_query(0x7000, 0) is None
    assert Event.made == 0


def test_events_are_queried_while_others_capture(rocm):
    """As the thread of `releases` does it, which would else fail, and keep for good what it asks about."""
    rocm.stub_set(0, 1)
    assert rocm.hipEventQuery(None) == 900
    before = capture.exchange(capture.RELAXED)
    assert rocm.hipEventQuery(None) == 0
    capture.exchange(before)


# graphs


def test_a_graph_is_captured_instantiated_launched_and_destroyed(rocm):
    launch = launcher().bind((1, 1, 1), 0, 0.0)
    graph = hip_graphs.HipGraph(0x7000, lambda: launch(0x7000, 0x1234))
    for _ in range(2):
        graph.launch(0x8000)
    del graph
    said = rocm.stub_log().decode().splitlines()
    assert said[0] == "begin 0x7000 2"
    assert said[1].endswith(" recorded")
    assert said[2:] == [
        "end 0x7000",
        "instantiate 0xa000 0",
        "destroy graph 0xa000",
        *["launch 0xb000 0x8000"] * 2,
        "destroy executable 0xb000",
    ]


def test_a_capture_ends_whatever_happens_in_it(rocm):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hip_graphs.HipGraph(0x7000, interrupted)
    assert rocm.stub_log().decode().splitlines() == ["begin 0x7000 2", "end 0x7000", "destroy graph 0xa000"]
    rocm.stub_set(0, 0)
    rocm.stub_fail_to_instantiate(98)
    with pytest.raises(BackendError, match=r"hipGraphInstantiateWithFlags failed with hipErrorInvalidDeviceFunction"):
        hip_graphs.HipGraph(0x7000, lambda: None)
    assert rocm.stub_log().endswith(b"destroy graph 0xa000\n")
    assert rocm.hipPeekAtLastError() == 0


@pytest.mark.parametrize("fails", [False, True])
def test_times_are_of_a_graph_or_of_the_calls_where_there_is_none(rocm, caplog, fails):
    launch = launcher().bind((1, 1, 1), 0, 0.0)
    operands = SimpleNamespace(
        weights=range(0x1000, 0x3000, 0x1000), run=lambda run, stream, weight: run(stream, weight)
    )
    rocm.stub_fail_to_instantiate(98 if fails else 0)
    run = timing.recorded(operands, launch, SimpleNamespace(ptr=0x7000), timing.CALLS)
    recorded = rocm.stub_log().count(b" recorded")
    assert recorded == timing.CALLS
    run()
    assert rocm.stub_log().count(b"plain") == recorded * (1 + fails)
    assert rocm.stub_log().count(b"launch 0xb000 0x7000") == 1 - fails
    assert ("without a graph" in caplog.text) is fails


@pytest.mark.parametrize(
    ("arch", "mebibytes"), [(0x942, 768), (0x950, 768), (0x90A, 192), (0x1201, 192)], ids=lambda x: f"{x:x}"
)
def test_weights_are_colder_than_the_infinity_cache(arch, mebibytes):
    target = MI300._replace(arch=arch)
    assert timing.cold_bytes(target) == mebibytes << 20
    assert timing.copies_of(target, 16 << 20) * 16 == mebibytes
    assert timing.copies_of(target, 1 << 40) == 2
    assert timing.copies_of(target, 1) == mebibytes // 3
