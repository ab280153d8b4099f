"""What interop passes on: views of arrays going in, results coming out, and the interface of a framework."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from fp8core.errors import DeviceError, DTypeError, LayoutError
from fp8core.interop import dlpack
from fp8core.problem import ITEMSIZE, Target
from fp8core.runtime import device, graph_memory, streams
from fp8core.runtime.releases import releases

new_tuple: Any = tuple.__new__
"""Makes a named tuple in a third of the time that its own constructor takes."""


class TensorView(NamedTuple):
    """An array as kernels see it; reading it copied nothing and waited for nothing."""

    pointer: int
    """The address of the first element; 0 is possible where there is none."""
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, as the array has them: 0 where it is broadcast, negative where it is reversed."""
    target: Target
    framework: "Framework"
    owner: Any
    """The array."""
    held: object = None
    """What else keeps the memory; it must live until the launch has been made."""


class Result(NamedTuple):
    """New memory of a framework's own, not cleared."""

    pointer: int
    array: Any
    """What `Framework.wrap` makes the caller's array from."""


Allocator = Callable[[int | None], tuple[int, Any]]
"""Allocates: the stream that will write, if it was given explicitly, in; the address and the array out."""


class Framework(ABC):
    """A framework as seen from here: its arrays read, its memory allocated, its streams asked."""

    name: str
    wraps: bool = False
    """Whether `wrap` has to make the caller's array from the one that was allocated."""
    immutable: bool = False
    """Whether no array of it can be written to, so that what others do in place gives a new array."""

    @abstractmethod
    def view(self, x: Any, name: str) -> TensorView:
        """Return a view of the framework's array ``x``, which errors call ``name``.

        Raises:
            DTypeError: its dtype is none of ours, or not in the machine's byte order.
            LayoutError: it has no strided memory of its own.
            DeviceError: it lies on a device that kernels cannot be launched on.
        """

    @abstractmethod
    def stream(self, target: Target) -> int:
        """Return the stream that the framework works on now: its address, 0 for the default one and on the host."""

    def stream_getter(self, target: Target) -> Callable[[], int]:
        """Return a function that asks for `stream` of the same target again and again."""
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
        """Return an uncleared array.

        Args:
            shape: its extents.
            dtype: the name of its dtype.
            target: where.
            strides: in elements; row-major if left out.
            stream: the stream that will write it, where that is not `stream(target)`: memory is reused in the
                order of a stream, so it has to come from the right one's pool.
        """

    def declared(self, x: Any, name: str) -> tuple[str, Target]:
        """Return the dtype and the device of ``x``, which a framework may know without its memory."""
        seen = self.view(x, name)
        return seen.dtype, seen.target

    def signature(self, x: Any) -> tuple[int, Any]:
        """Return the address of ``x`` and a hashable value: arrays of equal ones pass the same checks.

        None stands for a framework, or an array, that has to be viewed each time.
        """
        del x
        return 0, None

    address: Callable[[Any], int] | None = None
    """The address of an array, of a framework that has a `guard`."""
    blocked: Callable[[], object] = bool
    """Whether guards must not be asked now; of a framework that has them."""
    unguarded: str = ""
    """The attribute that is true of arrays of which guards must not be asked; of a framework that has them."""

    def guard(self, operands: tuple[Any, ...]) -> Callable[..., bool]:
        """Return a function that tells whether as many others have the signatures of ``operands``; no is safe."""
        del operands
        return lambda *_: False

    def allocator(
        self, shape: tuple[int, ...], dtype: str, target: Target, strides: tuple[int, ...] | None = None
    ) -> Allocator:
        """Return a function that allocates the same array again and again; it takes what `empty` takes as stream."""
        return lambda stream: self.empty(shape, dtype, target, strides, stream)

    def bare_memory(self, target: Target) -> tuple[Callable[[int, int], int], Callable[[int], object]] | None:
        """Return what allocates memory without an array, given bytes and a stream, and what frees it; None without.

        Such memory is at a multiple of 256 bytes, and goes to later requests on its stream as soon as it is freed.
        """
        del target
        return None

    def scratch(self, nbytes: int, target: Target, stream: int | None = None) -> Result:
        """Return ``nbytes`` of memory at a multiple of 256 bytes, alive as long as the result is."""
        array = self.empty((nbytes + 255,), "uint8", target, None, stream)
        return Result(-(-array.pointer // 256) * 256, array.array)

    def scratch_allocator(self, nbytes: int, target: Target) -> Allocator:
        """Return a function that allocates the same `scratch` again and again."""
        return lambda stream: self.scratch(nbytes, target, stream)

    def number(self, value: float, target: Target, stream: int) -> TensorView:
        """Return ``value`` as one fp32 number that ``stream`` writes: nothing waits, and no memory of the host is read.

        So it is also good within a capture; then it lives as long as the graph.
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

    def wrap(self, array: Any, stream: int = 0) -> Any:
        """Return the array of a result, written on ``stream``, as the framework's own; no copy."""
        del stream
        return array

    def reinterpret(self, x: Any, dtype: str) -> Any:
        """Return an array over the memory of ``x`` whose elements of one byte are of ``dtype``."""
        del x
        raise LayoutError(f"{self.name} cannot give the memory of an array another dtype ({dtype})")

    def producer(self, view: TensorView) -> int:
        """Return the stream on which the memory of a view is made: the framework's, unless arrays say otherwise."""
        return self.stream(view.target)

    def order_before(self, view: TensorView, stream: int, owner: object = None) -> None:
        """Let ``stream``, whose object is ``owner`` if there is one, wait for what is still done to a view's memory.

        Raises:
            DeviceError: that is being captured into a graph, and ``stream`` is not.
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
        """Let the framework's current stream wait for what ``stream`` does to a view's memory."""
        streams.join(self.stream(view.target), stream, view.target.device)

    def release(self, view: TensorView, stream: int) -> None:  # noqa: B027 - of arrays that name streams of their own
        """Let the stream that an array itself names wait for what ``stream`` does to its memory."""

    def keep(self, view: TensorView, stream: int, owner: object = None) -> None:
        """Keep the memory of an operand until ``stream``, which is not the one that it was made on, has passed.

        (torch's ``record_stream`` would not do: when the memory is freed it records an event on that stream, and ends
        the process if the stream, which is the caller's, is gone by then.)
        """
        del owner
        if stream != self.stream(view.target):
            releases().keep(view.owner, stream, view.target.device)

    wrote: Callable[[tuple[Any, ...]], object] | None = None
    """Takes note that arrays were written in place; None where nobody asks, as without autograd."""

    def written(self, x: Any, name: str) -> None:  # noqa: B027 - arrays can be written unless a framework says no
        """Raise LayoutError if ``x`` must not be written to."""


def fill_number(pointer: int, value: float, target: Target, stream: int) -> None:
    """Write one fp32 number, on ``stream`` where the target has streams."""
    if target.platform == "host":
        ctypes.c_float.from_address(pointer).value = value
    else:
        streams.fill_float32(pointer, value, stream, target.device)


def bytes_spanned(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> int:
    """Return how many bytes lie from the first to the last element, both included."""
    if 0 in shape:
        return 0
    return (sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + 1) * ITEMSIZE[dtype]


def bytes_reached(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """Return where elements begin and end, in bytes from the first one's address: it may be the last in memory."""
    if 0 in shape:
        return 0, 0
    reach = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    itemsize = ITEMSIZE[dtype]
    return sum(r for r in reach if r < 0) * itemsize, (sum(r for r in reach if r > 0) + 1) * itemsize


def strides_or_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return ``strides``, or those of a row-major array."""
    return dlpack.contiguous(shape) if strides is None else strides


def in_elements(strides: tuple[int, ...], itemsize: int, name: str) -> tuple[int, ...]:
    """Return strides given in bytes in elements.

    Raises:
        LayoutError: they are not multiples of an element, as in a field of a structured array.
    """
    if itemsize == 1:
        return strides
    for stride in strides:
        if stride % itemsize:
            raise LayoutError(f"{name} needs strides of whole elements of {itemsize} bytes, got {strides} bytes")
    return tuple(stride // itemsize for stride in strides)


def check_memory(pointer: int, shape: tuple[int, ...], name: str) -> None:
    """Refuse an array with elements and without memory: an exporter's null pointer, or a storage that was freed.

    Raises:
        LayoutError: the address is 0.
    """
    if not pointer and all(shape):
        raise LayoutError(f"{name} needs memory, got address 0 for shape {shape}")


def check_aligned(pointer: int, dtype: str, name: str) -> None:
    """Refuse an address at which a GPU cannot load or store an element.

    Raises:
        LayoutError: it is not a multiple of the element's size.
    """
    itemsize = ITEMSIZE[dtype]
    if pointer % itemsize:
        raise LayoutError(f"{name} needs elements at multiples of {itemsize} bytes, got address {pointer:#x}")


def refused_dtype(name: str, dtype: object) -> DTypeError:
    """Return the error for an operand, named by text or by an `Operand`, whose dtype is none of ours."""
    return DTypeError(f"{name} needs an array of {', '.join(getattr(name, 'takes', ITEMSIZE))}, got {dtype}")
