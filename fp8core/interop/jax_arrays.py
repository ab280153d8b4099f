"""Interop with JAX: its arrays read through DLPack, results in memory of ours that it takes over without a copy."""

import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from fp8core.errors import LayoutError
from fp8core.interop import cupy_arrays, numpy_arrays
from fp8core.interop.dlpack_capsule import Foreign
from fp8core.interop.float8 import DLPackView
from fp8core.interop.tensor import Result, TensorView, bytes_spanned, strides_or_contiguous
from fp8core.problem import ITEMSIZE, Target
from fp8core.runtime import device


class Returned:
    """Device memory lent to JAX; when JAX lets go of it, kernels of JAX that read it may still be in flight.

    JAX frees in the order of a compute stream that it does not name. Memory that came back waits here until an
    operation of JAX that began later has ended, and returns to CuPy's pool then.
    """

    def __init__(self) -> None:
        self._back: deque[object] = deque()
        self._fences: deque[tuple[Any, list[object]]] = deque()

    def lend(self, memory: Any) -> object:
        """Return an owner that hands ``memory`` back here when it dies."""
        return _Loan(memory, self._back)

    def sweep(self, fence: Callable[[], Any]) -> None:
        """Let go of what JAX is done with; ``fence()`` begins an operation of JAX that tells by ``is_ready()``."""
        while self._fences and self._fences[0][0].is_ready():
            self._fences.popleft()
        if self._back and not self._fences:
            back = [self._back.popleft() for _ in range(len(self._back))]
            self._fences.append((fence(), back))

    def __len__(self) -> int:
        return len(self._back) + sum(len(memory) for _, memory in self._fences)


class _Loan:
    __slots__ = ("_back", "_memory")

    def __init__(self, memory: Any, back: deque[object]) -> None:
        self._memory = memory
        self._back = back

    def __del__(self) -> None:
        self._back.append(self._memory)


class Jax(Foreign):
    """``jax.Array`` outside of `jax.jit`; arrays cannot be written to."""

    name = "jax"
    wraps = True
    immutable = True

    def __init__(self, jax: Any) -> None:
        self._jax = jax
        self._from_dlpack = jax.dlpack.from_dlpack
        self._returned: defaultdict[int, Returned] = defaultdict(Returned)
        self._ticker = cache(self._make_ticker)

    def view_on(self, x: Any, name: str, stream: int | None) -> TensorView:
        """Return a view of ``x``; tracers and deleted arrays are refused."""
        if isinstance(x, self._jax.core.Tracer):
            raise LayoutError(f"{name} must be an array with memory, got a tracer: fp8core works outside of jax.jit")
        if x.is_deleted():
            raise LayoutError(f"{name} must be an array with memory, got one that was deleted or donated")
        return super().view_on(x, name, stream)

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: str,
        target: Target,
        strides: tuple[int, ...] | None = None,
        stream: int | None = None,
    ) -> Result:
        """Return memory that JAX will take over: of NumPy on the host, of CuPy on a device."""
        steps = strides_or_contiguous(shape, strides)
        nbytes = bytes_spanned(shape, steps, dtype)
        if nbytes != math.prod(shape) * ITEMSIZE[dtype]:
            raise LayoutError(f"arrays of JAX have no gaps: shape {shape} with strides {steps} cannot be one")
        storage = np.dtype(f"u{ITEMSIZE[dtype]}")
        if target.platform == "host":
            array = numpy_arrays.memory(shape, storage, strides, nbytes)
            return Result(array.ctypes.data, DLPackView(array, dtype))
        ordinal = target.device
        returned = self._returned[ordinal]
        with device.allocating(self.stream(target) if stream is None else stream, ordinal):
            returned.sweep(partial(self._fence, ordinal))
            cupy = device.cupy()
            memory = cupy.cuda.alloc(nbytes)
            lent = cupy.cuda.UnownedMemory(memory.ptr, nbytes, returned.lend(memory), ordinal)
            pointer = cupy.cuda.MemoryPointer(lent, 0)
            array = cupy.ndarray(shape, storage, pointer, tuple(step * ITEMSIZE[dtype] for step in steps))
        return Result(memory.ptr, DLPackView(array, dtype))

    def scratch(self, nbytes: int, target: Target, stream: int | None = None) -> Result:
        """Return memory that JAX never sees."""
        native = numpy_arrays.framework() if target.platform == "host" else cupy_arrays.framework()
        return native.scratch(nbytes, target, stream)

    def wrap(self, array: Any, stream: int = 0) -> Any:
        """Return a jax.Array over the memory of a result, which JAX reads after what is on ``stream``."""
        kind, ordinal = array.__dlpack_device__()
        if kind == 1:
            return self._from_dlpack(array)
        with device.allocating(stream, ordinal):
            return self._from_dlpack(array)

    def written(self, x: Any, name: str) -> None:
        """Raise LayoutError: no array of JAX can be written to."""
        del x
        raise LayoutError(f"{name} must be writable, got an array of JAX, which cannot be written to")

    def _fence(self, ordinal: int) -> Any:
        """Begin a small operation on a device: when it has ended, so has all that JAX began there before."""
        return self._ticker(ordinal)()

    def _make_ticker(self, ordinal: int) -> Callable[[], Any]:
        jax = self._jax
        place = next(there for there in jax.local_devices(backend="gpu") if there.local_hardware_id == ordinal)
        one = jax.device_put(jax.numpy.zeros((), jax.numpy.int32), place)
        tick = jax.jit(lambda x: x + 1)
        return lambda: tick(one)


@cache
def framework() -> Jax:
    """Return the one Jax there is."""
    return Jax(sys.modules["jax"])
