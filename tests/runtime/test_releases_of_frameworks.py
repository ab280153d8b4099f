"""Memory that JAX gave back, and capsules of DLPack: kept until the stream has passed."""

import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from fp8core import interop
from fp8core.interop import TensorView, cuda_array, dlpack_capsule, jax_arrays
from fp8core.runtime import capture, device, streams
from support.releases import SECONDS, Owner, Stream, _freed, kept  # noqa: F401
from support.targets import AMPERE

# memory of JAX


def test_memory_that_jax_gave_back_waits_for_an_operation_that_began_later(kept):
    fence = Stream()
    begun = threading.Semaphore(0)

    def begin():
        begun.release()
        return fence.query(fence.submit())

    first, second = Owner(), Owner()
    signs = first.freed, second.freed
    owner = jax_arrays.JaxMemoryOwner(first, kept, begin)
    other = jax_arrays.JaxMemoryOwner(second, kept, begin)
    del first, second
    assert fence.submitted == 0
    del owner
    assert begun.acquire(timeout=SECONDS)
    assert fence.was_asked(3)
    del other  # after the operation began: it needs another
    assert fence.was_asked(3)
    assert fence.submitted == 1
    assert not any(sign.is_set() for sign in signs)
    fence.done = 1
    assert signs[0].wait(SECONDS)
    assert begun.acquire(timeout=SECONDS)
    assert not signs[1].is_set()
    fence.done = 2
    assert signs[1].wait(SECONDS)


def test_an_operation_that_cannot_begin_keeps_the_memory(kept, caplog):
    def begin():
        raise RuntimeError("backend is gone")

    owner = Owner()
    freed = owner.freed
    kept.after(owner, begin)
    del owner
    assert kept.wait(SECONDS)
    assert not freed.is_set()
    assert "backend is gone" in caplog.text


def test_threads_that_take_and_give_back_memory_free_nothing_early(kept):
    """What a pool hands out is in use on a compute stream that runs behind; what comes back must not be freed before."""
    compute, early = Stream(), []

    def begin():
        return compute.query(compute.submit())

    def work(_):
        for _ in range(200):
            memory = Owner(compute)  # an operation reads it
            weakref.finalize(memory, _freed, threading.Event(), early, compute, memory.ticket)
            owner = jax_arrays.JaxMemoryOwner(memory, kept, begin)
            del memory, owner
            compute.advance(20)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    running = threading.Event()

    def run_on():
        while not running.wait(0.0005):
            compute.advance(0)

    thread = threading.Thread(target=run_on)
    thread.start()
    try:
        assert kept.wait(SECONDS)
    finally:
        running.set()
        thread.join()
    assert not early


# capsules


def test_a_capsule_is_kept_from_the_end_of_its_view_until_the_stream_has_passed(kept, monkeypatch):
    stream = Stream()
    monkeypatch.setattr(dlpack_capsule, "releases", lambda: kept)
    monkeypatch.setattr(device, "current_stream", lambda ordinal: object())
    monkeypatch.setattr(streams, "event_query", lambda pointer, ordinal: stream.query(stream.submit()))
    monkeypatch.setattr(capture, "exchange", lambda mode: None)
    monkeypatch.setattr(device, "make_current", lambda ordinal: None)
    capsule = Owner()
    freed = capsule.freed
    held = dlpack_capsule.KeepAlive(capsule, 0x7000, 0)
    del capsule
    assert stream.submitted == 0
    del held
    assert stream.was_asked(3)
    assert not freed.is_set()
    stream.done = 1
    assert freed.wait(SECONDS)


def test_a_capsule_whose_stream_cannot_be_asked_about_is_kept(kept, monkeypatch, caplog):
    def broken(pointer, ordinal):
        raise RuntimeError("cudaErrorStreamCaptureImplicit")

    monkeypatch.setattr(dlpack_capsule, "releases", lambda: kept)
    monkeypatch.setattr(device, "current_stream", lambda ordinal: object())
    monkeypatch.setattr(streams, "event_query", broken)
    monkeypatch.setattr(capture, "exchange", lambda mode: None)
    monkeypatch.setattr(device, "make_current", lambda ordinal: None)
    capsule = Owner()
    freed = capsule.freed
    held = dlpack_capsule.KeepAlive(capsule, 0x7000, 0)
    del capsule, held
    assert kept.wait(SECONDS)
    assert not freed.is_set()
    assert "cudaErrorStreamCaptureImplicit" in caplog.text


@pytest.mark.parametrize("stream", [device.PER_THREAD, 0x7000])
@pytest.mark.parametrize("exporter", ["dlpack", "cuda array"])
def test_the_stream_of_the_thread_that_launched_is_asked_about_wherever_the_view_is_freed(
    kept, monkeypatch, exporter, stream
):
    """Each thread has its own per-thread default stream, under one number; a cycle or an error may free a view late."""
    asked, started = [], []

    def event_query(pointer, ordinal):
        asked.append((pointer, threading.get_ident()))
        return lambda: True

    monkeypatch.setattr(kept, "start", lambda: started.append(threading.get_ident()))
    monkeypatch.setattr(dlpack_capsule, "releases", lambda: kept)
    monkeypatch.setattr(device, "current_stream", lambda ordinal: object())
    monkeypatch.setattr(device, "stream", lambda ordinal=-1: stream)
    monkeypatch.setattr(streams, "event_query", event_query)
    monkeypatch.setattr(streams, "join", lambda waiting, awaited, ordinal: None)
    monkeypatch.setattr(capture, "exchange", lambda mode: None)
    monkeypatch.setattr(device, "make_current", lambda ordinal: None)
    target = AMPERE
    capsule = Owner()
    freed = capsule.freed
    if exporter == "dlpack":
        framework, held = dlpack_capsule.framework(), dlpack_capsule.KeepAlive(capsule, stream, target.device)
    else:
        framework = cuda_array.framework()
        held = cuda_array.CudaArrayKeepAlive(capsule, stream, target.device, None)
    del capsule
    assert started == [threading.get_ident()]  # not where the view is freed
    views = [TensorView(0x1000, "float32", (1,), (1,), target, framework, None, held)]
    del held
    interop.order_after(stream, views)
    freeing = threading.Thread(target=views.clear)
    freeing.start()
    freeing.join()
    assert freed.wait(SECONDS)
    assert asked == [(stream, threading.get_ident() if stream == device.PER_THREAD else freeing.ident)]


# the end of the process

KEPT = {
    "Export": "dlpack_capsule.Export(np.ones(2), None)",
    "KeepAlive": "dlpack_capsule.KeepAlive(object(), 0, 0, object())",
    "JaxMemoryOwner": "jax_arrays.JaxMemoryOwner(object(), releases.releases(), lambda: lambda: True)",
    "_Held": "dlpack_exchange._Held(dlpack_exchange.framework(torch.Tensor)._from_object, torch.ones(2))",
}


@pytest.mark.parametrize("name", KEPT)
def test_what_lives_as_long_as_its_module_is_freed_without_a_message(name):
    """At exit Python clears the names of modules that are still alive in the order of their definition."""
    if name == "_Held":
        torch = pytest.importorskip("torch")
        if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            pytest.skip("this torch has no exchange table")
    program = f"""
        import ctypes
        import sys
        import numpy as np
        {"import torch" if name == "_Held" else ""}
        from fp8core.interop import dlpack_capsule, dlpack_exchange, jax_arrays
        from fp8core.runtime import releases
        kept = {KEPT[name]}
        for module in sys.modules[type(kept).__module__], releases:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
        releases.last = kept
        del kept
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
