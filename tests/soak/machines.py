"""What the soak needs of a framework: memory, views of it, streams, and comparisons that run where the data are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import fp8core
from soak.arena import POISON, numpy_dtype
from support.engines import FP8, MAKERS


class Machine:
    """NumPy, and what others override: raw memory is a one-dimensional array of bytes of the framework."""

    name = "numpy"
    gpu = False

    def __init__(self) -> None:
        self.engine = MAKERS[self.name]()

    def upload(self, x: np.ndarray) -> Any:
        """Return the framework's array of these values, memory of its own."""
        return self.engine.array(np.array(x, order="C"))

    def memory(self, nbytes: int) -> Any:
        """Return raw memory."""
        return np.empty(nbytes, np.uint8)

    def poison(self, raw: Any) -> None:
        """Overwrite raw memory on the current stream."""
        raw[...] = POISON

    def typed(self, raw: Any, first: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...]) -> Any:
        """Return the array at byte ``first`` of raw memory; strides in bytes."""
        return np.ndarray(shape, numpy_dtype(dtype), raw, first, strides)

    def raw_of(self, x: Any) -> Any:
        """Return a dense copy of an array's bytes, made on the current stream."""
        return np.array(x, order="C").reshape(-1).view(np.uint8)

    def differing(self, got: Any, want: Any) -> Callable[[], int]:
        """Begin to count the bytes that differ, on the current stream, and return what waits for the number."""
        number = int(np.count_nonzero(got != want))
        return lambda: number

    def copy(self, to: Any, values: Any) -> None:
        """Copy an array into another one of its dtype, on the current stream."""
        to[...] = values

    def streams(self, count: int) -> list[Any]:
        """Return side streams; None is the current one."""
        return [None] * count

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Work on a stream of `streams`."""
        yield

    def hand_over(self, before: Any, after: Any) -> None:
        """Let what comes on stream ``after`` wait for what is on ``before``."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def free_bytes(self) -> int:
        """Return how much of the device's memory nobody has taken."""
        raise NotImplementedError(f"{self.name} has no device")

    def churn(self, rng: np.random.Generator) -> Any:
        """Take memory, fill it, and let most of it go, so that what comes next gets what others had."""
        taken = [self.memory(int(n)) for n in rng.integers(1, 1 << 14, 6)]
        for raw in taken:
            raw[...] = 0x7F
        return taken[int(rng.integers(6))]


class TorchMachine(Machine):
    """PyTorch on the CPU or a GPU."""

    def __init__(self, name: str) -> None:
        self.name, self.gpu = name, name == "torch-cuda"
        super().__init__()
        self.torch = self.engine.torch
        self.device = "cuda" if self.gpu else "cpu"

    def memory(self, nbytes):
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=self.device)

    def poison(self, raw):
        raw.fill_(POISON)

    def typed(self, raw, first, shape, dtype, strides):
        size = numpy_dtype(dtype).itemsize
        typed = raw[first:][: (raw.numel() - first) // size * size].view(getattr(self.torch, dtype))
        return typed.as_strided(shape, [step // size for step in strides], typed.storage_offset())

    def raw_of(self, x):
        return x.detach().contiguous().clone().reshape(-1).view(self.torch.uint8)

    def differing(self, got, want):
        number = (got != want).sum()
        return lambda: int(number)

    def copy(self, to, values):
        to.view(self.torch.uint8).copy_(values.view(self.torch.uint8))

    def streams(self, count):
        return [self.torch.cuda.Stream() if self.gpu else None for _ in range(count)]

    @contextmanager
    def on(self, stream):
        with self.torch.cuda.stream(stream):  # does nothing for None
            yield

    def hand_over(self, before, after):
        if self.gpu and before is not after:
            (after or self.torch.cuda.current_stream()).wait_stream(before or self.torch.cuda.current_stream())

    def synchronize(self):
        if self.gpu:
            self.torch.cuda.synchronize()

    def free_bytes(self):
        return self.torch.cuda.mem_get_info()[0]


class CupyMachine(Machine):
    """CuPy."""

    name, gpu = "cupy", True

    def __init__(self) -> None:
        super().__init__()
        self.cupy = self.engine.cupy

    def memory(self, nbytes):
        return self.cupy.empty(nbytes, np.uint8)

    def poison(self, raw):
        raw.fill(POISON)

    def typed(self, raw, first, shape, dtype, strides):
        eight = dtype in FP8
        held = self.cupy.ndarray(shape, np.uint8 if eight else numpy_dtype(dtype), raw.data + first, strides)
        return fp8core.Float8Array(held, dtype) if eight else held

    def raw_of(self, x):
        bytes_ = x.codes if isinstance(x, fp8core.Float8Array) else x
        return self.cupy.array(bytes_, order="C").reshape(-1).view(np.uint8)

    def differing(self, got, want):
        number = (got != want).sum()
        return lambda: int(number)

    def copy(self, to, values):
        to, values = (x.codes if isinstance(x, fp8core.Float8Array) else x for x in (to, values))
        to.view(f"u{to.itemsize}")[...] = values.view(f"u{to.itemsize}")

    def streams(self, count):
        return [self.cupy.cuda.Stream(non_blocking=True) for _ in range(count)]

    @contextmanager
    def on(self, stream):
        with stream if stream is not None else self.cupy.cuda.get_current_stream():
            yield

    def hand_over(self, before, after):
        if before is not after:
            here = self.cupy.cuda.get_current_stream()
            event = self.cupy.cuda.Event(disable_timing=True)
            event.record(before or here)
            (after or here).wait_event(event)

    def synchronize(self):
        self.cupy.cuda.Device().synchronize()

    def free_bytes(self):
        return self.cupy.cuda.runtime.memGetInfo()[0]


def installed(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the engines of those frameworks that are here."""
    found = {}
    for name in names:
        try:
            found[name] = MAKERS[name]()
        except pytest.skip.Exception:  # what the engines say of a framework that is absent
            continue
    return found


def machine(name: str) -> Machine:
    """Return the machine of a name."""
    if name.startswith("torch"):
        return TorchMachine(name)
    return CupyMachine() if name == "cupy" else Machine()
