"""The interface of a framework, and the framework of an array: found in `sys.modules`, and never imported."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, Final, ParamSpec, TypeVar

from fp8core.dtypes import ITEMSIZE
from fp8core.errors import DeviceError, LayoutError
from fp8core.interop.tensor import Allocator, Result, TensorView, fill_number
from fp8core.runtime import device, graph_memory, streams
from fp8core.runtime.limits import SCRATCH_ALIGNMENT
from fp8core.runtime.releases import releases
from fp8core.target import Target


class Framework(ABC):
    """The interface of a framework: reads its arrays, allocates its memory, and orders its streams."""

    name: str
    wraps: bool = False
    """Whether `wrap` has to turn an allocated array into the one that the caller gets."""
    orders_in_view: bool = False
    """Whether `view` makes a stream wait for the array, and takes a `LaunchStream` as its third argument."""
    pools_of_threads: bool = True
    """Whether its allocator tells the per-thread default streams of threads apart, which have one handle."""
    immutable: bool = False
    """Whether its arrays cannot be written to; operations that work in place for other frameworks return new arrays."""
    allows_gaps: bool = True
    """Whether its arrays can have rows with gaps between them."""

    @abstractmethod
    def view(self, x: Any, name: str) -> TensorView:
        """Return a view of the framework's array ``x``; ``name`` is its name in error messages.

        Raises:
            DTypeError: its dtype is not in `dtypes.ITEMSIZE`, or its byte order is not the machine's.
            LayoutError: it has no strided memory of its own.
            DeviceError: it is on a device that kernels cannot be launched on.
        """

    @abstractmethod
    def stream(self, target: Target) -> int:
        """Return the address of the framework's current stream; 0 for the default stream and on the host."""

    def stream_getter(self, target: Target) -> Callable[[], int]:
        """Return a function that returns the current `stream` of a target on each call."""
        return lambda: self.stream(target)

    @abstractmethod
    def empty(
        self,
        shape: tuple[int, ...],
        dtype: str,
        target: Target,
        strides: tuple[int, ...] | None = None,
        stream: int | None = None,
    ) -> Result:
        """Return an uninitialized array.

        Args:
            shape: its extents.
            dtype: the name of its dtype.
            target: the target to allocate on.
            strides: in elements; row-major if left out.
            stream: the stream that will write the array, if it is not `stream(target)`. Allocators reuse memory in the
                order of a stream, so the memory has to come from the pool of that stream.
        """

    def declared(self, x: Any, name: str) -> tuple[str, Target]:
        """Return the dtype and the device of ``x``; some frameworks know them for arrays without memory."""
        seen = self.view(x, name)
        return seen.dtype, seen.target

    def signature(self, x: Any) -> tuple[int, Any]:
        """Return the address of ``x`` and a hashable value; arrays with equal values pass the same checks.

        The value is None if the array, or every array of the framework, has to be viewed in each call.
        """
        del x
        return 0, None

    address: Callable[[Any], int] | None = None
    """Returns the address of an array; None for a framework without a `guard`."""
    blocked: Callable[[], object] = bool
    """Returns whether guards must not be called now; only used if the framework has guards."""
    unguarded: str = ""
    """The attribute that is true of arrays which must not be passed to a guard; only used if the framework has
    guards."""

    def guard(self, operands: tuple[Any, ...]) -> Callable[..., bool]:
        """Return a function that tests whether other arrays have the signatures of ``operands``.

        It may give false negatives, never false positives.
        """
        del operands
        return lambda *_: False

    def allocator(
        self, shape: tuple[int, ...], dtype: str, target: Target, strides: tuple[int, ...] | None = None
    ) -> Allocator:
        """Return a function that allocates such an array on each call; it takes the ``stream`` of `empty`."""
        return lambda stream: self.empty(shape, dtype, target, strides, stream)

    def bare_memory(self, target: Target) -> tuple[Callable[[int, int], int], Callable[[int], object]] | None:
        """Return a function that allocates memory without an array, from bytes and a stream, and one that frees it.

        None if the framework has no such functions. The memory is aligned to `SCRATCH_ALIGNMENT`, and is reused by
        later requests on its stream as soon as it is freed.
        """
        del target
        return None

    def scratch(self, nbytes: int, target: Target, stream: int | None = None) -> Result:
        """Return ``nbytes`` of memory aligned to `SCRATCH_ALIGNMENT`, which lives as long as the result."""
        array = self.empty((nbytes + SCRATCH_ALIGNMENT - 1,), "uint8", target, None, stream)
        return Result(-(-array.pointer // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT, array.array)

    def scratch_allocator(self, nbytes: int, target: Target) -> Allocator:
        """Return a function that allocates such a `scratch` on each call."""
        return lambda stream: self.scratch(nbytes, target, stream)

    def number(self, value: float, target: Target, stream: int) -> TensorView:
        """Return ``value`` as one fp32 number, written on ``stream`` without waiting and without reading host memory.

        So it also works during a capture; the number then lives as long as the graph.
        """
        owner = None
        if target.platform == "host":
            pointer, owner = self.scratch(ITEMSIZE["float32"], target)
        elif device.capturing(stream):
            pointer = graph_memory.allocate(ITEMSIZE["float32"], target, stream)
        else:
            pointer, owner = self.scratch(ITEMSIZE["float32"], target, stream)
        fill_number(pointer, value, target, stream)
        return TensorView(pointer, "float32", (1,), (1,), target, self, owner)

    def wrap(self, array: Any, stream: int = 0, like: Any = None) -> Any:
        """Return the array of a result, written on ``stream``, as an array of the framework, where ``like`` is."""
        del stream, like
        return array

    def reinterpret(self, x: Any, dtype: str) -> Any:
        """Return an array over the memory of ``x`` with the one-byte dtype ``dtype``."""
        del x
        raise LayoutError(f"{self.name} cannot give the memory of an array another dtype ({dtype})")

    def producer(self, view: TensorView) -> int:
        """Return the stream that produces a view's memory: the array's own, if it names one, or the framework's."""
        return self.stream(view.target)

    def order_before(self, view: TensorView, stream: int, owner: object = None) -> None:
        """Make ``stream`` wait for pending work on a view's memory; ``owner`` is the stream's object, if there is one.

        Raises:
            DeviceError: the stream of that work is being captured into a graph, and ``stream`` is not.
        """
        del owner
        producer = self.producer(view)
        if device.capturing(producer) and not device.capturing(stream):
            raise DeviceError(
                f"stream needs to be the captured one or to wait for it, got {stream:#x} while {self.name} captures "
                f"its stream {producer:#x} into a graph: pass stream="
            )
        streams.join(stream, producer, view.target.device)

    def order_after(self, view: TensorView, stream: int) -> None:
        """Make the framework's current stream wait for the work of ``stream`` on a view's memory."""
        streams.join(self.stream(view.target), stream, view.target.device)

    def release(self, view: TensorView, stream: int) -> None:  # noqa: B027 - only for arrays that name a stream
        """Make the stream that an array names wait for the work of ``stream`` on its memory."""

    def keep(self, view: TensorView, stream: int) -> None:
        """Keep an operand alive until ``stream`` has passed the launch, if it is not the framework's current stream.

        (torch's ``record_stream`` is no alternative: when the memory is freed it records an event on the caller's
        stream, and aborts the process if that stream has been destroyed.)
        """
        if stream != self.stream(view.target):
            releases().keep(view.owner, stream, view.target.device)

    wrote: Callable[[tuple[Any, ...]], object] | None = None
    """Tells the framework that arrays were written in place; None if it need not know, as without autograd."""

    def check_writable(self, x: Any, name: str) -> None:  # noqa: B027 - by default arrays can be written to
        """Raise LayoutError if ``x`` must not be written to."""

    def always_writable(self, x: Any) -> bool:
        """Return whether all arrays with the signature of ``x``, which is writable now, always are."""
        del x
        return True


P = ParamSpec("P")
F = TypeVar("F", bound=Framework)
_FOUND: Final[dict[type, Framework | None]] = {}


def only_instance(make: Callable[P, F]) -> Callable[P, F]:
    """Cache what ``make`` returns, like `functools.cache`; threads that call it at once get one and the same framework.

    Frameworks are compared by identity: arrays of two instances would be ordered like those of two frameworks.
    """
    made: dict[Any, F] = {}

    def first(*arguments: P.args, **keywords: P.kwargs) -> F:
        return made.setdefault(arguments, make(*arguments, **keywords))

    return cache(first)  # type: ignore[return-value]


def framework_of(cls: type) -> Framework | None:
    """Return the framework of arrays of type ``cls``, or None if they support no known protocol."""
    try:
        return _FOUND[cls]
    except KeyError:
        return _FOUND.setdefault(cls, _find(cls))


def _find(cls: type) -> Framework | None:
    if _is(cls, "torch", "Tensor"):
        from fp8core.interop import torch_tensors

        return torch_tensors.framework()
    if _is(cls, "cupy", "ndarray"):
        from fp8core.interop import cupy_arrays

        return cupy_arrays.framework()
    if _is(cls, "jax", "Array") or _is(cls, "jax.core", "Tracer"):
        from fp8core.interop import jax_arrays

        return jax_arrays.framework()
    if _is(cls, "numpy", "ndarray"):
        from fp8core.interop import numpy_arrays

        return numpy_arrays.framework()
    if hasattr(cls, "__dlpack_c_exchange_api__"):
        from fp8core.interop import dlpack_exchange

        if dlpack_exchange.is_offered(cls) and (exchange := dlpack_exchange.framework(cls)).allocates:
            return exchange
    if hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__"):
        from fp8core.interop import dlpack_capsule

        return dlpack_capsule.framework()
    if hasattr(cls, "__cuda_array_interface__"):
        from fp8core.interop import cuda_array

        return cuda_array.framework()
    return None


def _is(cls: type, module: str, attribute: str) -> bool:
    known = getattr(sys.modules.get(module), attribute, None)
    return isinstance(known, type) and issubclass(cls, known)
