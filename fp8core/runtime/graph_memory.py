"""Device memory that lives as long as the graph that was captured with it.

A framework's pool reuses memory, in the order of streams, as soon as its array is dropped. A graph that was captured
with the address may be launched much later, and would overwrite the memory's new contents. Here the driver reports when
a graph, everything instantiated from it, and their launches are gone: the graph owns a user object with a destructor.
The driver calls the destructor on a thread of its own, possibly while it holds locks, and possibly after the
interpreter has ended. So the destructor is a C function that takes no lock, ``sem_post``; the first request of a later
capture checks the semaphores and frees the memory of graphs that are gone.
"""

import ctypes
import threading
from functools import cache
from typing import Any, Final

from fp8core.errors import BackendError
from fp8core.runtime import capture, device
from fp8core.runtime.limits import SCRATCH_ALIGNMENT
from fp8core.target import Target

_NO_DESTRUCTOR_SYNC: Final = 1
"""CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, the only kind; the same number in HIP."""
_MOVE: Final = 1
"""CU_GRAPH_USER_OBJECT_MOVE: the graph takes over the initial reference to the object; the same number in HIP."""
_SEMAPHORE_BYTES: Final = 64
"""At least sizeof(sem_t), which is 32 with glibc and 16 with musl on 64 bits."""


class _Arena:
    """The memory of one graph."""

    def __init__(self, graph: int) -> None:
        self.owners: list[Any] = []
        self.scratch: dict[tuple[int, int, object], tuple[int, int]] = {}
        """By `_stream_of`: address and size of the stream's scratch."""
        self._gone = _semaphore()
        _retain(graph, self._gone)

    def gone(self) -> bool:
        """Return whether the graph and its executables are destroyed, so that their memory may be freed."""
        if self._gone and not _libc().sem_trywait(self._gone):
            semaphore, self._gone = self._gone, 0  # before it is freed: an interrupted sweep keeps the arena
            _libc().sem_destroy(semaphore)
            _libc().free(semaphore)
        return not self._gone


_ARENAS: Final[dict[int, _Arena]] = {}
"""The arenas of all devices, by the id of the capture."""
_LOCK: Final = threading.RLock()  # re-entrant: garbage collection may take it again


def allocate(nbytes: int, target: Target, stream: int) -> int:
    """Return the address of uninitialized memory of the graph that a stream is captured into, aligned to 256 bytes.

    Raises:
        BackendError: the stream is not being captured.
        cupy.cuda.memory.OutOfMemoryError: the device has not enough memory.
    """
    with _LOCK:
        return _allocate(_arena_of(stream), nbytes, target)


def scratch(nbytes: int, target: Target, stream: int) -> int:
    """Return the address of a graph's scratch for a stream: the same one for all calls that it is large enough for.

    Launches on one stream run in order, also in a graph, so one scratch serves all launches of a capture on a stream.
    """
    with _LOCK:
        arena, own = _arena_of(stream), _stream_of(stream, target)
        pointer, size = arena.scratch.get(own, (0, 0))
        if size < nbytes or not pointer:
            # Requests grow in the course of a model: with doubling, all scratches of a stream together take less than
            # twice the size of the last one.
            size = max(nbytes, 2 * size, SCRATCH_ALIGNMENT)
            pointer = _allocate(arena, size, target)
            arena.scratch[own] = pointer, size
        return pointer


def sweep() -> None:
    """Free the memory of graphs that are gone; called by the first request of each capture."""
    with _LOCK:
        # Garbage collection may start another sweep here: the first one to find an arena drops it.
        gone = [(number, arena) for number, arena in list(_ARENAS.items()) if arena.gone()]
        for number, _ in gone:
            _ARENAS.pop(number, None)
    del gone


def _stream_of(stream: int, target: Target) -> tuple[int, int, object]:
    """Return what identifies a stream: its handle may be that of the default stream of each thread, on any device."""
    return target.device, stream, threading.current_thread() if stream == device.PER_THREAD else None


def _arena_of(stream: int) -> _Arena:
    captured = capture.info(stream)
    if captured is None:
        raise BackendError(f"memory of a graph needs a stream that is being captured, got {stream:#x}")
    arena = _ARENAS.get(captured.id)
    if arena is None:
        sweep()
        arena = _ARENAS[captured.id] = _Arena(captured.graph)
    return arena


def _allocate(arena: _Arena, nbytes: int, target: Target) -> int:
    with device.allocating(0, target.device), capture.relaxed():
        memory = _pool().malloc(max(nbytes, 1))
    arena.owners.append(memory)
    pointer: int = memory.ptr
    if pointer % SCRATCH_ALIGNMENT:
        raise BackendError(f"CuPy's pool needs to align memory to {SCRATCH_ALIGNMENT} bytes, got {pointer:#x}")
    return pointer


@cache
def _pool() -> Any:
    """Return a CuPy pool that only graphs use.

    Memory of the common pool may still be in use by work from before the capture, and a graph that is launched on
    another stream would not wait for that work. An asynchronous pool would add a node to the graph.
    """
    return device.cupy().cuda.MemoryPool()


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    for function in (libc.free, libc.sem_destroy, libc.sem_trywait):
        function.argtypes = (ctypes.c_void_p,)
    libc.free.restype = None
    return libc


def _semaphore() -> int:
    """Return the address of a semaphore with value 0, in memory that may outlive the interpreter, as a graph may."""
    address: int | None = _libc().malloc(_SEMAPHORE_BYTES)
    if not address:
        raise MemoryError(f"no memory for a semaphore of {_SEMAPHORE_BYTES} bytes")
    if _libc().sem_init(address, 0, 0):
        _libc().free(address)
        raise BackendError(f"sem_init failed with errno {ctypes.get_errno()}")
    return address


def _retain(graph: int, semaphore: int) -> None:
    """Make the driver post the semaphore when a graph and everything instantiated from it are destroyed."""
    prefix = "cu" if device.platform() == "cuda" else "hip"
    create, retain, release = (
        getattr(device.driver(), prefix + name)
        for name in ("UserObjectCreate", "GraphRetainUserObject", "UserObjectRelease")
    )
    create.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    retain.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    release.argtypes = (ctypes.c_void_p, ctypes.c_uint)
    post = ctypes.cast(_libc().sem_post, ctypes.c_void_p)
    made = ctypes.c_void_p()
    status = create(ctypes.byref(made), semaphore, post, 1, _NO_DESTRUCTOR_SYNC)
    if status:
        _libc().free(semaphore)
        device.check(status, f"{prefix}UserObjectCreate")
    status = retain(graph, made, 1, _MOVE)
    if status:
        release(made, 1)  # posts the semaphore, perhaps later, so it stays allocated
        device.check(status, f"{prefix}GraphRetainUserObject", f"graph {graph:#x}")
