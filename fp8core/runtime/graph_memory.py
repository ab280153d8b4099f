"""Device memory that lives as long as the graph it was captured into.

A framework's pool hands memory out again as soon as its array is dropped, in the order of streams; a graph that was
captured with the address may be launched much later, and would overwrite what lies there by then. Here the driver
says when a graph, all that was instantiated from it, and their launches are gone: a user object of the graph has a
destructor. That runs on a thread of the driver's, which may hold its locks, also after the interpreter has ended. So it
is a function of C that takes no lock, ``sem_post``; the next request looks at the semaphores and frees what is due.
"""

import ctypes
import threading
from functools import cache
from typing import Any, Final

from fp8core.errors import BackendError
from fp8core.problem import Target
from fp8core.runtime import capture, device

ALIGNMENT: Final = 256
_NO_DESTRUCTOR_SYNC: Final = 1
"""CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, the only kind that there is; the same number in HIP."""
_MOVE: Final = 1
"""CU_GRAPH_USER_OBJECT_MOVE: the graph takes over the reference that the object was created with; the same in HIP."""
_SEMAPHORE_BYTES: Final = 64
"""At least sizeof(sem_t), which is 32 with glibc and 16 with musl on 64 bits."""


class _Arena:
    """The memory of one graph."""

    def __init__(self, graph: int) -> None:
        self.owners: list[Any] = []
        self.scratch: dict[int, tuple[int, int]] = {}
        """By stream: the address and the size of the largest."""
        self._gone = _semaphore()
        _retain(graph, self._gone)

    def gone(self) -> bool:
        """Return whether the graph and its executables are destroyed; what they used may be freed then."""
        if self._gone and not _libc().sem_trywait(self._gone):
            semaphore, self._gone = self._gone, 0  # before it is freed: what interrupts a sweep leaves the arena there
            _libc().sem_destroy(semaphore)
            _libc().free(semaphore)
        return not self._gone


_ARENAS: Final[dict[int, _Arena]] = {}
"""By the ids of their captures, of all devices."""
_LOCK: Final = threading.RLock()  # a collection of garbage within may come back here


def allocate(nbytes: int, target: Target, stream: int) -> int:
    """Return the address of uncleared memory, at a multiple of 256 bytes, of the graph that a stream is captured into.

    Raises:
        BackendError: the stream is not being captured.
        cupy.cuda.memory.OutOfMemoryError: there is no such memory.
    """
    with _LOCK:
        return _allocate(_arena_of(stream), nbytes, target)


def scratch(nbytes: int, target: Target, stream: int) -> int:
    """Return the address of a graph's scratch: the same one for all calls on the stream that it is large enough for.

    What is launched on one stream runs in order, also in a graph, so that one scratch serves every launch of a capture.
    """
    with _LOCK:
        arena = _arena_of(stream)
        pointer, size = arena.scratch.get(stream, (0, 0))
        if size < nbytes or not pointer:
            # Larger ones are requested as a model goes on: doubled, they take no more than three times the last.
            size = max(nbytes, 2 * size, ALIGNMENT)
            pointer = _allocate(arena, size, target)
            arena.scratch[stream] = pointer, size
        return pointer


def sweep() -> None:
    """Free the memory of the graphs that are gone; every request does so before it allocates."""
    with _LOCK:
        # A collection of garbage may sweep within: an arena is dropped by whoever comes first.
        gone = [(number, arena) for number, arena in list(_ARENAS.items()) if arena.gone()]
        for number, _ in gone:
            _ARENAS.pop(number, None)
    del gone


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
    if pointer % ALIGNMENT:
        raise BackendError(f"CuPy's pool needs to align memory to {ALIGNMENT} bytes, got {pointer:#x}")
    return pointer


@cache
def _pool() -> Any:
    """Return a pool of CuPy's for graphs alone.

    From the common pool could come memory that work before the capture is still done with, which a graph launched on
    another stream would not wait for; and with an asynchronous pool a node of the graph.
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
    """Return the address of a semaphore of 0, in memory that outlives the interpreter as a graph may."""
    address: int | None = _libc().malloc(_SEMAPHORE_BYTES)
    if not address:
        raise MemoryError(f"no memory for a semaphore of {_SEMAPHORE_BYTES} bytes")
    if _libc().sem_init(address, 0, 0):
        _libc().free(address)
        raise BackendError(f"sem_init failed with errno {ctypes.get_errno()}")
    return address


def _retain(graph: int, semaphore: int) -> None:
    """Let the semaphore be posted when a graph is destroyed, and with it all that was instantiated from it."""
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
        release(made, 1)  # which posts the semaphore, perhaps later: it stays allocated
        device.check(status, f"{prefix}GraphRetainUserObject", f"graph {graph:#x}")
