"""Memory of graphs, against a stand-in for the driver: freed when the graph is gone, not before, and not twice."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from types import SimpleNamespace

import pytest

from fp8core.errors import BackendError
from fp8core.runtime import capture, device, graph_memory
from support.graph_driver import driver, pool  # noqa: F401
from support.targets import AMPERE

TARGET = AMPERE


def test_a_capture_has_a_number_and_a_graph(driver):
    driver.captures[0x7000] = (5, 0xAA)
    assert capture.info(0x7000) == (5, 0xAA)
    assert capture.info(0x8000) is None


def test_a_driver_without_captures_is_refused_by_name(driver, monkeypatch):
    monkeypatch.setattr(device, "driver", SimpleNamespace)
    with pytest.raises(BackendError, match=r"the driver has no .*StreamGetCaptureInfo_v2"):
        capture.info(0x7000)


def test_the_mode_of_the_thread_is_restored(driver):
    driver.modes = [1]
    with pytest.raises(ZeroDivisionError), capture.relaxed():
        assert driver.modes[-1] == 2
        raise ZeroDivisionError
    assert driver.modes[-1] == 1


def test_the_error_of_a_call_counts_and_not_that_of_the_capture_it_ended():
    ended = []

    def end():
        ended.append(True)
        raise BackendError("the capture was invalidated")

    with pytest.raises(ZeroDivisionError):
        capture.record(lambda: 1 // 0, end)
    assert ended


def test_scratch_is_shared_by_the_calls_of_a_stream_and_grows(driver, pool):
    driver.captures = {0x7000: (1, 0xAA), 0x8000: (1, 0xAA), 0x9000: (2, 0xBB)}
    first = graph_memory.scratch(1000, TARGET, 0x7000)
    assert graph_memory.scratch(600, TARGET, 0x7000) == first
    other = graph_memory.scratch(1000, TARGET, 0x8000)
    third = graph_memory.scratch(1000, TARGET, 0x9000)
    assert len({first, other, third}) == 3, "streams run at the same time, and so do graphs"
    larger = graph_memory.scratch(1001, TARGET, 0x7000)
    assert larger != first
    assert graph_memory.scratch(2000, TARGET, 0x7000) == larger
    assert all(address % 256 == 0 for address in (first, other, third, larger))
    assert pool.used() == 1000 * 3 + 2000, "what was replaced is in the graph, too"
    assert graph_memory.scratch(0, TARGET, 0x7000) == larger


def test_scratch_is_not_shared_by_streams_of_one_handle(driver, pool):
    """The per-thread default streams of all threads and devices have one handle, and can be in one capture."""
    driver.captures = {device.PER_THREAD: (1, 0xAA)}
    elsewhere = TARGET._replace(device=TARGET.device + 1)
    made = [graph_memory.scratch(1000, target, device.PER_THREAD) for target in (TARGET, elsewhere)]
    with ThreadPoolExecutor(1) as thread:
        made.append(thread.submit(graph_memory.scratch, 1000, TARGET, device.PER_THREAD).result())
    assert len(set(made)) == 3
    assert graph_memory.scratch(1000, TARGET, device.PER_THREAD) == made[0]
    assert graph_memory.scratch(1000, elsewhere, device.PER_THREAD) == made[1]
    assert driver.allocating == [(0, TARGET.device), (0, elsewhere.device), (0, TARGET.device)], "streams and devices"


def test_memory_is_freed_with_its_graph_and_not_before(driver, pool):
    driver.captures = {0x7000: (1, 0xAA)}
    graph_memory.scratch(1000, TARGET, 0x7000)
    graph_memory.allocate(4, TARGET, 0x7000)
    driver.captures = {}
    graph_memory.sweep()
    assert pool.used() == 1004
    driver.captures = {0x7000: (2, 0xBB)}
    graph_memory.scratch(10, TARGET, 0x7000)
    assert pool.used() == 1004 + 256
    driver.destroy(0xAA)
    graph_memory.sweep()
    assert pool.used() == 256
    graph_memory.sweep()
    driver.destroy(0xBB)
    driver.captures = {0x7000: (3, 0xAA)}
    graph_memory.scratch(2000, TARGET, 0x7000)
    assert pool.used() == 2000, "a request frees what is due, and a handle that is used again is another graph"
    assert len(graph_memory._ARENAS) == 1


def test_a_sweep_that_was_interrupted_is_made_again(driver, pool):
    """Between the question whether a graph is gone and what follows from it."""
    driver.captures = {0x7000: (1, 0xAA)}
    graph_memory.scratch(1000, TARGET, 0x7000)
    (arena,) = graph_memory._ARENAS.values()
    assert not arena.gone()
    driver.destroy(0xAA)
    assert arena.gone()
    assert arena.gone(), "the semaphore was freed with the first answer"
    del arena
    graph_memory.sweep()
    assert pool.used() == 0
    assert not graph_memory._ARENAS


def test_a_sweep_may_begin_within_another(driver, pool, monkeypatch):
    """As a collection of garbage within it may: both drop what they find, and neither fails."""
    driver.captures = {0x7000: (1, 0xAA), 0x8000: (2, 0xBB)}
    graph_memory.scratch(1000, TARGET, 0x7000)
    graph_memory.scratch(10, TARGET, 0x8000)
    asked = graph_memory._Arena.gone

    def gone(arena):
        monkeypatch.setattr(graph_memory._Arena, "gone", asked)
        answer = asked(arena)
        graph_memory.sweep()
        return answer

    monkeypatch.setattr(graph_memory._Arena, "gone", gone)
    driver.destroy(0xAA)
    driver.destroy(0xBB)
    graph_memory.sweep()
    assert pool.used() == 0
    assert not graph_memory._ARENAS


@pytest.fixture
def semaphores(monkeypatch):
    """Return the addresses of semaphores that are not freed."""
    there, libc = set(), graph_memory._libc()

    def malloc(nbytes):
        address = libc.malloc(nbytes)
        there.add(address)
        return address

    def free(address):
        there.remove(address)
        libc.free(address)

    rest = {name: getattr(libc, name) for name in ("sem_init", "sem_post", "sem_trywait", "sem_destroy")}
    monkeypatch.setattr(graph_memory, "_libc", lambda: SimpleNamespace(malloc=malloc, free=free, **rest))
    return there


def test_a_semaphore_is_freed_with_its_graph(driver, pool, semaphores):
    driver.captures = {0x7000: (1, 0xAA), 0x8000: (2, 0xBB)}
    for stream in driver.captures:
        graph_memory.scratch(1000, TARGET, stream)
    assert len(semaphores) == 2
    driver.destroy(0xAA)
    graph_memory.sweep()
    assert len(semaphores) == 1
    driver.fail = "UserObjectCreate"
    driver.captures = {0x9000: (3, 0xCC)}
    with pytest.raises(BackendError):
        graph_memory.scratch(1000, TARGET, 0x9000)
    assert len(semaphores) == 1


def test_memory_of_no_bytes_has_an_address(driver, pool):
    driver.captures = {0x7000: (1, 0xAA)}
    assert graph_memory.scratch(0, TARGET, 0x7000) > 0
    assert graph_memory.allocate(0, TARGET, 0x7000) > 0
    assert all(block.nbytes for block in pool.blocks)


def test_memory_that_is_not_aligned_is_refused(driver, pool):
    driver.captures, pool.next = {0x7000: (1, 0xAA)}, 0x10080
    with pytest.raises(BackendError, match="CuPy's pool needs to align memory to 256 bytes, got 0x10080"):
        graph_memory.scratch(1000, TARGET, 0x7000)


def test_numbers_have_memory_of_their_own(driver, pool):
    driver.captures = {0x7000: (1, 0xAA)}
    addresses = [graph_memory.allocate(4, TARGET, 0x7000) for _ in range(3)]
    assert len({*addresses, graph_memory.scratch(4, TARGET, 0x7000)}) == 4


def test_one_object_is_retained_for_a_graph(driver, pool):
    driver.captures = {0x7000: (1, 0xAA), 0x8000: (1, 0xAA)}
    for stream in (0x7000, 0x8000, 0x7000):
        graph_memory.scratch(100, TARGET, stream)
        graph_memory.allocate(100, TARGET, stream)
    assert [len(objects) for objects in driver.graphs.values()] == [1]


def test_a_stream_that_is_not_captured_is_refused(driver, pool):
    with pytest.raises(BackendError, match="needs a stream that is being captured, got 0x7000"):
        graph_memory.scratch(100, TARGET, 0x7000)
    assert not pool.used()


@pytest.mark.parametrize("call", ["GetCaptureInfo", "UserObjectCreate", "RetainUserObject", "ThreadExchange"])
def test_a_call_that_fails_is_named_and_leaves_nothing(driver, pool, call):
    driver.captures = {0x7000: (1, 0xAA)}
    driver.fail = call
    with pytest.raises(BackendError, match=rf"{call}\w* failed with status 999"):
        graph_memory.scratch(100, TARGET, 0x7000)
    assert not pool.used()
    assert sorted(driver.objects) == sorted(chain.from_iterable(driver.graphs.values())), "all others are released"
    if device.platform() == "hip":
        assert driver.sticky == 0, "the next launch of any library would report it"
    driver.fail = ""
    graph_memory.scratch(100, TARGET, 0x7000)
    assert pool.used() == 256
    assert [len(objects) for objects in driver.graphs.values()] == [1]


def test_a_failed_allocation_leaves_the_arena_as_it_was(driver, pool, monkeypatch):
    driver.captures = {0x7000: (1, 0xAA)}
    first = graph_memory.scratch(100, TARGET, 0x7000)

    def full(nbytes):
        raise MemoryError(nbytes)

    with monkeypatch.context() as patched:
        patched.setattr(pool, "malloc", full)
        with pytest.raises(MemoryError):
            graph_memory.scratch(1 << 40, TARGET, 0x7000)
    assert driver.modes[-1] == 0
    assert graph_memory.scratch(100, TARGET, 0x7000) == first


def test_threads_that_capture_get_memory_of_their_own(driver, pool):
    driver.captures = {0x7000 + i: (i + 1, 0xA00 + i) for i in range(8)}
    found = [set() for _ in range(8)]

    def work(i):
        for _ in range(200):
            found[i].add(graph_memory.scratch(100, TARGET, 0x7000 + i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(addresses) == 1 for addresses in found)
    assert len(set.union(*found)) == 8


@pytest.mark.parametrize(
    ("platform", "stream", "asked"), [("cuda", 0, 0), ("cuda", 1, 0), ("cuda", 2, 1), ("cuda", 99, 1)]
)
def test_the_default_stream_is_never_captured_and_not_asked_about(monkeypatch, platform, stream, asked):
    """While a blocking stream is captured, the driver refuses the question about the default one."""
    questions = []

    def capturing(number):
        questions.append(number)
        return True

    module = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(streamIsCapturing=capturing)))
    monkeypatch.setattr(device, "cupy", lambda: module)
    monkeypatch.setattr(device, "platform", lambda: platform)
    device._asking_capture.cache_clear()
    try:
        assert device.capturing(stream) is bool(asked)
        assert len(questions) == asked
    finally:
        device._asking_capture.cache_clear()
