"""Stand-ins for the driver and for CuPy's pool in captures: graphs that can be destroyed, and memory that is told of."""

import ctypes
import gc
import threading
import weakref
from contextlib import contextmanager

import pytest

from fp8core.runtime import capture, device, graph_memory

DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Memory:
    """A block of a stand-in for CuPy's pool."""

    def __init__(self, nbytes, address):
        self.nbytes, self.ptr = nbytes, address


class Driver:
    """The driver's calls for captures and user objects, with graphs that can be destroyed."""

    def __init__(self, prefix="cu", version="_v3"):
        self.captures, self.modes, self.objects, self.graphs = {}, [0], {}, {}
        self.fail, self.sticky, self.allocating, self.current = "", 0, [], None
        self.unused = (None,) * (3 if version == "_v3" else 2)
        for name, function in {
            f"{prefix}StreamGetCaptureInfo{version}": self.info,
            f"{prefix}UserObjectCreate": self.create,
            f"{prefix}UserObjectRelease": self.release,
            f"{prefix}GraphRetainUserObject": self.retain,
            f"{prefix}ThreadExchangeStreamCaptureMode": self.exchange,
        }.items():
            setattr(self, name, self.exported(name, function))

    def exported(self, name, function):
        def call(*arguments):
            types = getattr(call, "argtypes", None)
            assert types is None or len(types) == len(arguments), name
            status = 999 if self.fail and self.fail in name else function(*arguments)
            self.sticky = status or self.sticky
            return status

        return call

    @contextmanager
    def allocates(self, stream, ordinal):
        """Stand in for `device.allocating`: CuPy's allocator uses its current stream and device."""
        self.current = stream, ordinal
        yield
        self.current = None

    def hipGetLastError(self):
        self.sticky = 0

    def info(self, stream, status, number, graph, *unused):
        assert unused == self.unused
        found = self.captures.get(stream)
        status._obj.value = int(found is not None)
        number._obj.value, graph._obj.value = found or (0, None)
        return 0

    def exchange(self, mode):
        before = self.modes[-1]
        self.modes.append(mode._obj.value)
        mode._obj.value = before
        return 0

    def create(self, made, pointer, destroy, count, flags):
        assert (count, flags) == (1, 1)
        number = 0xB000 + len(self.objects)
        self.objects[number] = (pointer, destroy.value)
        made._obj.value = number
        return 0

    def retain(self, graph, made, count, flags):
        assert (count, flags) == (1, 1), "the reference moves to the graph"
        self.graphs.setdefault(graph, []).append(made.value)
        return 0

    def release(self, made, count):
        self.destroy_object(made.value)
        return 0

    def destroy_object(self, number):
        pointer, destroy = self.objects.pop(number)
        DESTRUCTOR(destroy)(pointer)

    def destroy(self, graph):
        """Destroy a graph, on a thread of the driver's own."""

        def work():
            for number in self.graphs.pop(graph):
                self.destroy_object(number)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


class Pool:
    """A stand-in for ``cupy.cuda.MemoryPool`` that tells what is in use, and in which mode it was asked."""

    def __init__(self, driver):
        self.driver, self.blocks, self.next = driver, weakref.WeakSet(), 0x10000

    def malloc(self, nbytes):
        assert self.driver.modes[-1] == capture.RELAXED, "an allocation would end the capture"
        assert self.driver.current, "the memory would be another device's"
        self.driver.allocating.append(self.driver.current)
        block = Memory(nbytes, self.next)
        self.next += -(-nbytes // 512) * 512
        self.blocks.add(block)
        return block

    def used(self):
        gc.collect()
        return sum(block.nbytes for block in self.blocks)


@pytest.fixture(params=[("cuda", "cu", "_v3"), ("cuda", "cu", "_v2"), ("hip", "hip", "_v2")], ids="".join)
def driver(request, monkeypatch):
    platform, prefix, version = request.param
    stand_in = Driver(prefix, version)
    monkeypatch.setattr(device, "platform", lambda: platform)
    monkeypatch.setattr(device, "driver", lambda: stand_in)
    monkeypatch.setattr(device, "status_name", lambda status: f"status {status}")
    monkeypatch.setattr(device, "allocating", stand_in.allocates)
    monkeypatch.setattr(graph_memory, "_ARENAS", {})
    capture._info.cache_clear()
    yield stand_in
    capture._info.cache_clear()


@pytest.fixture
def pool(driver, monkeypatch):
    blocks = Pool(driver)
    monkeypatch.setattr(graph_memory, "_pool", lambda: blocks)
    return blocks
