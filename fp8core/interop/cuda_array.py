"""Arrays that offer ``__cuda_array_interface__`` and no DLPack: those of numba and PyCUDA, among others."""

from operator import index
from typing import Any, Final

from fp8core.dtypes import ITEMSIZE
from fp8core.errors import LayoutError
from fp8core.interop.dlpack import check_extents, contiguous
from fp8core.interop.dlpack_capsule import ExporterFramework, KeepAlive
from fp8core.interop.frameworks import only_instance
from fp8core.interop.names import exported
from fp8core.interop.tensor import TensorView, bytes_reached, check_aligned, check_memory, in_elements, refused_dtype
from fp8core.runtime import device, streams

DTYPES: Final = {"<f4": "float32", "<f2": "float16", "|u1": "uint8", "<i4": "int32", "<i8": "int64"}
"""The dtypes, by typestr, that the interface can express; bfloat16 and FP8 are not among them."""
WANTED: Final = "an array with __cuda_array_interface__"


class CudaArrayKeepAlive(KeepAlive):
    """Keeps an array that a kernel reads or writes, and its producer's stream."""

    __slots__ = ("producer",)

    def __init__(self, array: Any, stream: int, ordinal: int, producer: int | None) -> None:
        super().__init__(array, stream, ordinal)
        self.producer = stream if producer is None else producer


class CudaArray(ExporterFramework):
    """Any exporter of the interface; results are CuPy arrays, which export it too."""

    name = "cuda_array_interface"

    def view(self, x: Any, name: str) -> TensorView:
        """Return a view of ``x``; `order_before` waits for the stream that ``x`` names, if it names one.

        Raises:
            LayoutError: x has a mask, names stream 0 (which is ambiguous), lacks fields of the interface, or has other
                strides than one for each axis.
            DTypeError: the dtype is not float32, float16, uint8, int32 or int64.
        """
        with exported(x, name, WANTED):
            offer = x.__cuda_array_interface__
            pointer, shape = index(offer["data"][0] or 0), tuple(map(index, offer["shape"]))
            check_extents(shape)
            steps = None if offer.get("strides") is None else tuple(map(index, offer["strides"]))
            producer = None if offer.get("stream") is None else index(offer["stream"])
            typestr = str(offer["typestr"])
        if offer.get("mask") is not None:
            raise LayoutError(f"{name} needs a plain array, got a masked one, whose mask would be lost")
        if producer == 0:
            raise LayoutError(f"{name} needs a stream that __cuda_array_interface__ has a number for, got 0")
        dtype = DTYPES.get(typestr)
        if dtype is None:
            raise refused_dtype(name, typestr)
        if steps is not None and len(steps) != len(shape):
            raise LayoutError(f"{name} needs a stride for each of {len(shape)} axes, got {steps}")
        itemsize = int(typestr[2:])
        strides = contiguous(shape) if steps is None else in_elements(shape, steps, itemsize, name)
        check_memory(pointer, shape, name)
        check_aligned(pointer, dtype, name)
        ordinal = device.current() if not pointer else ordinal_of(pointer)
        held = CudaArrayKeepAlive(x, device.stream(ordinal), ordinal, producer)
        return TensorView(pointer, dtype, shape, strides, device.target(ordinal), self, x, held)

    def producer(self, view: TensorView) -> int:
        """Return the stream that the array names; CuPy's current stream if it names none."""
        assert isinstance(view.held, CudaArrayKeepAlive)
        return view.held.producer

    def order_before(self, view: TensorView, stream: int, owner: object = None) -> None:
        """Make ``stream`` wait for the array's own stream, and keep the array until ``stream`` has passed."""
        super().order_before(view, stream, owner)
        assert isinstance(view.held, CudaArrayKeepAlive)
        view.held.read_on(stream, owner)

    def release(self, view: TensorView, stream: int) -> None:
        """Make the array's own stream wait for a launch: the producer's next work may read or reuse the memory."""
        super().release(view, stream)
        streams.join(self.producer(view), stream, view.target.device)

    def check_writable(self, x: Any, name: str) -> None:
        """Raise LayoutError if ``x`` says that it is read-only."""
        with exported(x, name, WANTED):
            read_only = x.__cuda_array_interface__["data"][1]
        if read_only:
            raise LayoutError(f"{name} needs to be writable, got a read-only {type(x).__name__}")


def as_cupy(x: Any) -> Any:
    """Return a CuPy array over the memory of ``x``, some codes; CuPy's current stream waits for the stream of ``x``."""
    seen, cupy = framework().view(x, "codes"), device.cupy()
    ordinal = seen.target.device
    framework().order_before(seen, device.stream(ordinal), device.current_stream(ordinal))
    begin, end = bytes_reached(seen.shape, seen.strides, seen.dtype)
    memory = cupy.cuda.UnownedMemory(seen.pointer + begin, end - begin, x, ordinal)
    steps = tuple(stride * ITEMSIZE[seen.dtype] for stride in seen.strides)
    return cupy.ndarray(seen.shape, seen.dtype, cupy.cuda.MemoryPointer(memory, -begin), steps)


def ordinal_of(pointer: int) -> int:
    """Return the device that memory at an address belongs to."""
    return int(device.cupy().cuda.runtime.pointerGetAttributes(pointer).device)


@only_instance
def framework() -> CudaArray:
    """Return the only instance of `CudaArray`."""
    return CudaArray()
