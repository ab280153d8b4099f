"""Interop with PyTorch, through the module that made the tensors: `sys.modules` has it when one arrives."""

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from fp8core.errors import DeviceError, LayoutError
from fp8core.interop.dlpack import contiguous
from fp8core.interop.tensor import (
    Allocator,
    Framework,
    Result,
    TensorView,
    new_tuple,
    refused_dtype,
    strides_or_contiguous,
)
from fp8core.problem import HOST, ITEMSIZE, Target
from fp8core.runtime import device


class Torch(Framework):
    """``torch.Tensor`` and its subclasses, read without DLPack, which costs ten times as much.

    A tensor that requires grad is read like any other, and results never require it: nothing here is
    differentiated.
    """

    name = "torch"

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._dtypes = {name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)}
        self._names = {dtype: name for name, dtype in self._dtypes.items()}
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._on = cache(lambda ordinal: torch.device("cuda", ordinal))
        self._empty_strided = torch.empty_strided
        self._cpu = torch.device("cpu")
        self._guards = _guards(torch)
        self.address = None if self._guards is None else torch.Tensor.data_ptr

    def view(self, x: Any, name: str) -> TensorView:
        """Return a view of a tensor; what is sparse, fake, or on another device than CUDA, ROCm and CPU is refused."""
        try:
            pointer = x.data_ptr()
            strides = x.stride()
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise LayoutError(
                f"{name} must be a strided tensor with memory of its own, got {x.layout}: {reason}"
            ) from error
        dtype = self._names.get(x.dtype)
        if dtype is None:
            raise refused_dtype(name, x.dtype)
        if x.is_cuda:
            target = device.target(x.get_device())
        elif x.is_cpu:
            target = HOST
        else:
            raise DeviceError(f"{name} must be on a CUDA or ROCm device or the CPU, got {x.device}")
        if not pointer and x.numel():
            raise LayoutError(
                f"{name} must have memory of its own, got a {type(x).__name__} of shape {tuple(x.shape)} without"
            )
        if strides and strides[-1] != 1 and x.is_neg():
            raise LayoutError(f"{name} has the negative bit of torch set: call resolve_neg() first")
        seen: TensorView = new_tuple(TensorView, (pointer, dtype, tuple(x.shape), strides, target, self, x, None))
        return seen

    def look(self, x: Any) -> tuple[int, Any]:
        """Return the address of a tensor and what `view` asks of it."""
        try:
            pointer = x.data_ptr()
            return pointer, (x.dtype, x.shape, x.stride(), x.device) if pointer else None
        except (RuntimeError, NotImplementedError):  # sparse, fake: `view` has the words
            return 0, None

    def guard(self, operands: tuple[Any, ...]) -> Callable[..., bool]:
        """Return the guard of torch's compiled graphs: it compares every field that `look` reads, and more."""
        assert self._guards is not None
        check: Callable[..., bool] = self._guards(*operands, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check

    def allocator(
        self, shape: tuple[int, ...], dtype: str, target: Target, strides: tuple[int, ...] | None = None
    ) -> Allocator:
        """Return a function that allocates the same tensor again and again."""
        steps = strides_or_contiguous(shape, strides)
        where = self._cpu if target.platform == "host" else self._on(target.device)
        make = partial(self._empty_strided, shape, steps, dtype=self._dtypes[dtype], device=where)
        like = make()
        like.untyped_storage().resize_(0)
        make_alike = partial(self._torch.empty_like, like)  # half a microsecond faster
        if make_alike().stride() == steps:  # not so where elements lie apart
            make = make_alike

        def new(stream: int | None) -> tuple[int, Any]:
            if stream is not None:
                return self.empty(shape, dtype, target, steps, stream)
            array = make()
            return array.data_ptr(), array

        return new

    def scratch_allocator(self, nbytes: int, target: Target) -> Allocator:
        """Return a function that allocates bytes; on a device torch aligns all memory to 512."""
        if target.platform == "host":
            return super().scratch_allocator(nbytes, target)
        return self.allocator((nbytes,), "uint8", target)

    def stream(self, target: Target) -> int:
        """Return torch's current stream on the device of ``target``."""
        if target.platform == "host" or self._raw_stream is None:
            return 0
        stream: int = self._raw_stream(target.device)
        return stream

    def stream_getter(self, target: Target) -> Callable[[], int]:
        """Return a function that asks for torch's current stream on the device of ``target``."""
        if target.platform == "host" or self._raw_stream is None:
            return int
        return partial(self._raw_stream, target.device)

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: str,
        target: Target,
        strides: tuple[int, ...] | None = None,
        stream: int | None = None,
    ) -> Result:
        """Return an uncleared tensor from torch's own allocator, of the pool of ``stream``."""
        if stream is not None and stream != self.stream(target):
            return self._empty_on(stream, shape, dtype, target, strides)
        where = self._cpu if target.platform == "host" else self._on(target.device)
        if strides is None:
            strides = contiguous(shape)
        # Half a microsecond faster than torch.empty.
        array = self._empty_strided(shape, strides, dtype=self._dtypes[dtype], device=where)
        made: Result = new_tuple(Result, (array.data_ptr(), array))
        return made

    def _empty_on(
        self, stream: int, shape: tuple[int, ...], dtype: str, target: Target, strides: tuple[int, ...] | None
    ) -> Result:
        if target.platform == "host":
            return self.empty(shape, dtype, target, strides)
        cuda = self._torch.cuda
        with cuda.stream(cuda.ExternalStream(stream, device=self._on(target.device))):
            return self.empty(shape, dtype, target, strides)

    def reinterpret(self, x: Any, dtype: str) -> Any:
        """Return a tensor over the same memory."""
        return x.detach().view(self._dtypes[dtype])

    def order(self, view: TensorView, stream: int, owner: object = None) -> None:
        """Let ``stream`` wait for torch's current stream."""
        del owner
        if view.target.platform != "host":
            device.join(stream, self.stream(view.target), view.target.device)


def _guards(torch: Any) -> Any:
    """Return the class of torch's guards, or None where it is not what it is known to be."""
    guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
    try:
        x, y = torch.zeros(2, 4, 4, device="cpu")
        others = x[:2], x[:, :2], x.t(), x.int(), torch.empty(4, 4, device="meta"), torch.nn.Parameter(y), x.to_sparse()
        check = guards(x, x, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        exact = check(x, y) and not any(check(x, other) for other in others)
    except (TypeError, AttributeError, RuntimeError):
        return None
    return guards if exact else None


@cache
def framework() -> Torch:
    """Return the one Torch there is."""
    return Torch(sys.modules["torch"])
