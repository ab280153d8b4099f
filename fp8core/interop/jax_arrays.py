"""Interop with JAX: calls on its arrays become JAX programs, made by `fp8core.jax`, which is imported here.

If the caller gives a stream, or if a call also has arrays of other frameworks, JAX arrays are read through DLPack, and
results are allocated by this library and handed to JAX without a copy.
"""

import math
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Final

import numpy as np

from fp8core.dtypes import ITEMSIZE
from fp8core.errors import LayoutError
from fp8core.interop import cupy_arrays, numpy_arrays
from fp8core.interop.dlpack_capsule import DLPackExporters
from fp8core.interop.float8 import DLPackView
from fp8core.interop.frameworks import only_instance
from fp8core.interop.launch_streams import LaunchStream
from fp8core.interop.tensor import Result, TensorView, bytes_spanned, refused_gaps, strides_or_contiguous
from fp8core.interop.versions import OLDEST_JAX_ARRAYS, is_older
from fp8core.runtime import device
from fp8core.runtime.releases import Releases, releases
from fp8core.target import HOST, Target

PROGRAMS: Final = "fp8core.jax"
"""The module that makes calls on JAX arrays. It is in a layer above this one, so it is imported by name at run time."""
_TAKEN: Final = "inside of jax.jit the functions of fp8core and fp8core.jax.Fp8Linear take it, and nothing else"
_DIVIDED: Final = "calls whose arrays are all JAX's, without a stream, and fp8core.jax.Fp8Linear take it"


class JaxMemoryOwner:
    """The owner of device memory that JAX uses.

    When JAX frees it, kernels of JAX that read it may still be running: JAX frees in the order of a compute stream
    that it does not expose. So the memory is kept until a JAX operation that was started later has ended, and then
    returns to CuPy's pool.
    """

    __slots__ = ("_begin", "_memory", "_releases")

    def __init__(self, memory: Any, queue: Releases, begin: Callable[[], Callable[[], bool]]) -> None:
        self._memory = memory
        self._releases = queue
        self._begin = begin

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:  # names of modules may be gone then
        if not exiting():
            self._releases.after(self._memory, self._begin)


class Jax(DLPackExporters):
    """``jax.Array`` outside `jax.jit`; these arrays cannot be written to."""

    name = "jax"
    wraps = True
    immutable = True
    allows_gaps = False

    def __init__(self, jax: Any) -> None:
        self._jax = jax
        self._from_dlpack = jax.dlpack.from_dlpack
        self._fence = cache(self._make_fence)
        self._tracers = _TAKEN
        try:
            import_module(PROGRAMS)
        except (ImportError, AttributeError) as error:  # an older JAX: its arrays are only read through DLPack
            self._tracers = f"inside of jax.jit {error}"

    def view(self, x: Any, name: str, launch: LaunchStream | None = None) -> TensorView:
        """Return a view of ``x``; tracers and deleted arrays are refused."""
        if isinstance(x, self._jax.core.Tracer):
            raise LayoutError(f"{name} needs memory of its own, got a tracer: {self._tracers}")
        if x.is_deleted():
            raise LayoutError(f"{name} needs memory of its own, got one that was deleted or donated")
        if len(x.devices()) > 1:
            raise LayoutError(f"{name} needs to be on one device here, got an array on {len(x.devices())}: {_DIVIDED}")
        return super().view(x, name, launch)

    def declared(self, x: Any, name: str) -> tuple[str, Target]:
        """Return the dtype and the device of ``x``; for a tracer, JAX's default device."""
        if isinstance(x, self._jax.core.Tracer):
            chosen = self._jax.config.jax_default_device
            there = self._jax.devices(chosen)[0] if chosen is None or isinstance(chosen, str) else chosen
        else:
            there = next(iter(x.sharding.device_set))
        target = HOST if there.platform == "cpu" else device.target(there.local_hardware_id)
        return numpy_arrays.dtype_of(x.dtype, name), target

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: str,
        target: Target,
        strides: tuple[int, ...] | None = None,
        stream: int | None = None,
    ) -> Result:
        """Return memory that JAX can take over: NumPy's on the host, CuPy's on a device."""
        steps = strides_or_contiguous(shape, strides)
        nbytes = bytes_spanned(shape, steps, dtype)
        if nbytes != math.prod(shape) * ITEMSIZE[dtype]:
            raise refused_gaps(self.name, shape, steps)
        storage = np.dtype(f"u{ITEMSIZE[dtype]}")
        if target.platform == "host":
            array = numpy_arrays.memory(shape, storage, strides, nbytes)
            return Result(array.ctypes.data, DLPackView(array, dtype))
        ordinal = target.device
        fence = self._fence(ordinal)
        with device.allocating(self.stream(target) if stream is None else stream, ordinal):
            memory = device.cupy().cuda.alloc(nbytes)
            lent = _lent(memory, memory.ptr, nbytes, ordinal, fence)
            array = device.cupy().ndarray(shape, storage, lent, tuple(step * ITEMSIZE[dtype] for step in steps))
        return Result(memory.ptr, DLPackView(array, dtype))

    def lend(self, codes: Any, dtype: str) -> Any:
        """Return a jax.Array over the memory of a CuPy array of bytes, copied only if it has gaps.

        JAX reads it after the work on CuPy's current stream. The memory is kept until JAX is done with it.
        """
        ordinal = int(codes.device.id)
        fence = self._fence(ordinal)
        with device.on(ordinal):  # JAX does not restore the current device
            whole = codes if codes.flags.c_contiguous else codes.copy()
            lent = _lent(whole, whole.data.ptr, whole.nbytes, ordinal, fence)
            array = device.cupy().ndarray(whole.shape, whole.dtype, lent)
            return self._from_dlpack(DLPackView(array, dtype))

    def scratch(self, nbytes: int, target: Target, stream: int | None = None) -> Result:
        """Return memory that JAX never sees."""
        native = numpy_arrays.framework() if target.platform == "host" else cupy_arrays.framework()
        return native.scratch(nbytes, target, stream)

    def wrap(self, array: Any, stream: int = 0, like: Any = None) -> Any:
        """Return a jax.Array over the memory of a result; JAX reads it after the work on ``stream``.

        JAX may divide the CPU into several devices. The result is copied if ``like`` is on another one than the first.
        """
        kind, ordinal = array.__dlpack_device__()
        if kind == 1:
            return self._from_dlpack(array, device=None if like is None else next(iter(like.devices())))
        with device.allocating(stream, ordinal):
            return self._from_dlpack(array)

    def check_writable(self, x: Any, name: str) -> None:
        """Raise LayoutError: no array of JAX can be written to."""
        del x
        raise LayoutError(f"{name} needs to be writable, got an array of JAX, which cannot be written to")

    def _make_fence(self, ordinal: int) -> Callable[[], Callable[[], bool]]:
        """Return a function that starts a small JAX operation, and returns a query whether it has ended.

        When it has ended, so has everything that JAX started before it on that device.
        """
        jax = self._jax
        place = next(there for there in jax.local_devices(backend="gpu") if there.local_hardware_id == ordinal)
        tick = jax.jit(lambda x: x + 1)
        with device.on(ordinal):  # JAX does not restore the current device
            one = jax.device_put(jax.numpy.zeros((), jax.numpy.int32), place)
            jax.block_until_ready(tick(one))  # compile now, not when memory is released

        def begin() -> Callable[[], bool]:
            ready: Callable[[], bool] = tick(one).is_ready
            return ready

        return begin


def _lent(memory: Any, pointer: int, nbytes: int, ordinal: int, fence: Callable[[], Callable[[], bool]]) -> Any:
    """Return memory as a pointer of CuPy, which keeps its owner until JAX, which gets it, is done with it."""
    queue = releases()
    queue.start()
    cuda = device.cupy().cuda
    owned = cuda.UnownedMemory(pointer, nbytes, JaxMemoryOwner(memory, queue, fence), ordinal)
    return cuda.MemoryPointer(owned, 0)


@only_instance
def framework() -> Jax:
    """Return the only instance of `Jax`.

    Raises:
        LayoutError: the release of JAX is too old to share memory.
    """
    jax = sys.modules["jax"]
    if is_older(jax.__version__, OLDEST_JAX_ARRAYS):
        raise LayoutError(
            f"arrays of JAX need JAX {OLDEST_JAX_ARRAYS} or later, got {jax.__version__}: older releases do not know "
            "FP8 in DLPack, or misread transposed memory"
        )
    return Jax(jax)
