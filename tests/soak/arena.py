"""One stretch of poisoned memory in which all operands of an example lie, and what is seen of it afterwards."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import fp8core
from support.engines import FP8

POISON = 0xA5
GUARD = 64
"""Bytes of poison before and after each operand, at least."""
PAGE = 256
"""What the first byte of an arena is aligned to."""


class Layout(NamedTuple):
    """How an array lies in memory. Offsets and gaps are in elements, but for ``bytes_off``."""

    kind: str = "rows"
    gap: int = 0
    """Elements between two rows."""
    offset: int = 0
    bytes_off: int = 0


PLAIN = Layout()
ODD_KINDS = ("strided columns", "turned", "not folding", "misaligned", "reversed rows", "reversed columns")
"""The last two are not for torch, which has no negative strides."""


class Place(NamedTuple):
    """Where an array lies: ``first`` is the byte of its first element, strides are in bytes."""

    first: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of a name, with those of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


def steps(shape: tuple[int, ...], layout: Layout) -> list[int]:
    """Return strides in elements; the last two axes are laid out, the others fold into rows."""
    if not shape:
        return []
    if layout.kind == "turned" and len(shape) > 1:
        inner = [1, shape[-2] + layout.gap]
        span = shape[-1] * inner[1]
    else:
        step = {"strided columns": 2, "reversed columns": -1}.get(layout.kind, 1)
        span = max(abs(step) * max(shape[-1], 1) + layout.gap, 1)
        inner = [span, step]
        span *= max(shape[-2], 1) if len(shape) > 1 else 1
    strides = inner[-min(len(shape), 2) :]
    for extent in reversed(shape[1:-2]):
        strides.insert(0, span)
        span *= max(extent, 1)
    if len(shape) > 2:
        strides.insert(0, span)
    if layout.kind == "reversed rows" and len(shape) > 1:
        strides[-2] *= -1
    if layout.kind == "not folding" and len(shape) > 2:
        strides[0] += 3 * abs(strides[-2]) + 3
    return strides


class Arena:
    """Memory of one engine: "numpy", "torch-cpu", "cupy" or "torch-cuda"."""

    def __init__(self, engine: str, nbytes: int = 1 << 18) -> None:
        self.engine = engine
        room = np.empty(nbytes + PAGE, np.uint8)
        start = -room.ctypes.data % PAGE
        self.host = room[start : start + nbytes]
        self.host[:] = POISON
        self.device: Any = None
        self.odd: tuple[int, str] | None = None
        """Which of the operands with elements is laid out oddly, and how."""
        self.refused = False
        """Whether one was laid out as no kernel can read it."""
        self._end = 0
        self._before = b""

    def put(self, values: np.ndarray, layout: Layout = PLAIN, *, at: int | None = None) -> Place:
        """Lay out ``values``, after all that is there already or over it, at the byte ``at``."""
        size = values.dtype.itemsize
        if values.size:
            layout = self._oddly(values, layout)
        strides = tuple(step * size for step in steps(values.shape, layout))
        reach = [step * (extent - 1) for step, extent in zip(strides, values.shape, strict=True) if extent]
        below, above = -sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + size
        start = -(-(self._end + GUARD) // PAGE) * PAGE if at is None else at
        first = start + below + layout.offset * size + layout.bytes_off
        self._end = max(self._end, first + above)
        assert self._end + GUARD <= self.host.size, "the arena is too small for this example"
        place = Place(first, values.dtype.name, values.shape, strides)
        self.seen(place)[...] = values
        return place

    def _oddly(self, values: np.ndarray, layout: Layout) -> Layout:
        if self.odd is None:
            return layout
        number, kind = self.odd
        self.odd = (number - 1, kind)
        if number or layout.kind != "rows":
            return layout
        if kind == "misaligned":
            self.refused = values.dtype.itemsize > 1
            return layout._replace(bytes_off=1)
        return layout._replace(kind=kind)

    def seen(self, place: Place, memory: np.ndarray | None = None) -> np.ndarray:
        """Return the NumPy array of a place, over the arena itself or over a copy of its memory."""
        memory = self.host if memory is None else memory
        return np.ndarray(place.shape, numpy_dtype(place.dtype), memory, place.first, place.strides)

    def values(self, place: Place) -> np.ndarray:
        """Return a copy of what a place holds now, contiguous."""
        return np.array(self.seen(place, self.memory()), order="C")

    def seal(self) -> None:
        """Upload what was laid out, and remember it: `array` and `changed` work from here on."""
        if self.engine in ("cupy", "torch-cuda"):
            import cupy

            self.device = cupy.asarray(self.host)
            cupy.cuda.Device().synchronize()
        self._before = self.host.tobytes()

    def array(self, place: Place) -> Any:
        """Return the engine's array at a place; no copy."""
        if self.engine == "numpy":
            return self.seen(place)
        if self.engine == "torch-cpu":
            return _torch_cpu(self.host, place)
        return _cupy(self.device, place) if self.engine == "cupy" else _torch_cuda(self.device, place)

    def memory(self) -> np.ndarray:
        """Return the bytes as they are now."""
        if self.device is None:
            return self.host
        import cupy

        cupy.cuda.Device().synchronize()
        return self.device.get()

    def changed(self, written: tuple[Place, ...] = ()) -> list[int]:
        """Return the bytes, outside of the elements of ``written``, that are not what they were."""
        different = np.frombuffer(self._before, np.uint8) != self.memory()
        for place in written:
            size = numpy_dtype(place.dtype).itemsize
            raw = np.ndarray((*place.shape, size), np.bool_, different, place.first, (*place.strides, 1))
            raw[...] = False
        return np.flatnonzero(different).tolist()


def _storage(place: Place) -> str:
    return {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}[numpy_dtype(place.dtype).itemsize]


def _torch_cpu(host: np.ndarray, place: Place) -> Any:
    import torch

    held = np.ndarray(place.shape, _storage(place), host, place.first, place.strides)
    return torch.from_numpy(held).view(getattr(torch, place.dtype))


def _cupy(device: Any, place: Place) -> Any:
    import cupy

    eight = place.dtype in FP8
    dtype = np.uint8 if eight else numpy_dtype(place.dtype)
    held = cupy.ndarray(place.shape, dtype, device.data + place.first, place.strides)
    return fp8core.Float8Array(held, place.dtype) if eight else held


class _Interface:
    def __init__(self, device: Any, place: Place) -> None:
        self.owner = device
        self.__cuda_array_interface__ = {
            "shape": place.shape,
            "typestr": np.dtype(_storage(place)).str,
            "data": (device.data.ptr + place.first, False),
            "strides": place.strides,
            "version": 3,
        }


def _torch_cuda(device: Any, place: Place) -> Any:
    import torch

    if 0 in place.shape:
        return torch.empty(place.shape, dtype=getattr(torch, place.dtype), device="cuda")
    return torch.as_tensor(_Interface(device, place), device="cuda").view(getattr(torch, place.dtype))
