"""Interop with PyTorch, whose module is in `sys.modules` when a tensor arrives."""

import math
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from fp8core.dtypes import ITEMSIZE
from fp8core.errors import DeviceError, LayoutError
from fp8core.interop.dlpack import contiguous
from fp8core.interop.eager import skip_frames
from fp8core.interop.frameworks import Framework, only_instance
from fp8core.interop.tensor import (
    Allocator,
    Result,
    TensorView,
    bytes_spanned,
    check_aligned,
    new_tuple,
    refused_dtype,
    strides_or_contiguous,
)
from fp8core.interop.torch_modes import Modes
from fp8core.runtime import device, loaded
from fp8core.target import HOST, Target


class Torch(Framework):
    """``torch.Tensor`` and its subclasses, read without DLPack, which takes ten times as long.

    A tensor that requires grad is read like any other, and results never require grad: nothing is differentiated here.
    """

    name = "torch"
    pools_of_threads = False
    unguarded = "is_nested"
    """torch's guards read strides first, and abort the process for tensors without strides."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._dtypes = {name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)}
        self._names = {dtype: name for name, dtype in self._dtypes.items()}
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._on = cache(lambda ordinal: torch.device("cuda", ordinal))
        self._empty_strided = torch.empty_strided
        self._cpu = torch.device("cpu")
        self._modes = Modes(torch)
        self._guards = cache(partial(_guards, torch))  # no cached_property: its lock would not survive a fork
        self.blocked = self._modes.count
        self.wrote = _increment(torch)
        skip_frames()

    @property
    def address(self) -> Callable[[Any], int] | None:  # type: ignore[override]
        """The function that returns a tensor's address; None if torch has no usable guards.

        It is first read outside of modes, as the test of the guards fails inside them.
        """
        address: Callable[[Any], int] | None = None if self._guards() is None else self._torch.Tensor.data_ptr
        return address

    def view(self, x: Any, name: str) -> TensorView:
        """Return a view of a tensor; sparse, fake and wrapped tensors, and those on other devices, are refused."""
        mode = self._modes.active()
        if mode is not None:
            raise LayoutError(f"{name} needs memory of its own, got a {type(x).__name__} inside {mode}")
        if not self._modes.plain[type(x)]:
            raise LayoutError(
                f"{name} needs memory of its own, got a {type(x).__name__}, whose class has __torch_dispatch__"
            )
        try:
            pointer = x.data_ptr()
            strides = x.stride()
        except RuntimeError as error:
            if self._modes.wrapped(x):
                raise LayoutError(f"{name} needs memory of its own, got a tensor of torch.func's transforms") from error
            got = "a nested tensor" if x.is_nested else f"{x.layout}: {str(error).splitlines()[0]}"
            raise LayoutError(f"{name} needs a strided tensor with memory of its own, got {got}") from error
        dtype, target = self.declared(x, name)
        if not pointer and (x.numel() or self._modes.functional(x)):
            raise LayoutError(
                f"{name} needs memory of its own, got a {type(x).__name__} of shape {tuple(x.shape)} without any"
            )
        if x.is_neg():
            raise LayoutError(
                f"{name} needs its values in memory, got torch's negative bit set: call resolve_neg() first"
            )
        check_aligned(pointer, dtype, name)
        shape = tuple(x.shape)
        needed = x.storage_offset() * x.itemsize + bytes_spanned(shape, strides, dtype)
        if needed > x.untyped_storage().nbytes() and x.numel():
            raise LayoutError(
                f"{name} needs a storage of {needed} bytes, got one that was resized to {x.untyped_storage().nbytes()}"
            )
        seen: TensorView = new_tuple(TensorView, (pointer, dtype, shape, strides, target, self, x, None))
        return seen

    def declared(self, x: Any, name: str) -> tuple[str, Target]:
        """Return the dtype and the device of a tensor, a fake one included."""
        dtype = self._names.get(x.dtype)
        if dtype is None:
            raise refused_dtype(name, x.dtype)
        return dtype, self._target(x, name)

    def _target(self, x: Any, name: str) -> Target:
        if x.is_cpu:
            return HOST
        if not x.is_cuda:
            raise DeviceError(f"{name} needs memory of a CUDA or ROCm device or the CPU, got {x.device}")
        if self._torch.version.hip:  # torch may have been loaded after CuPy, with its own copy of the HIP runtime
            loaded.refuse_second_hip_runtime()
        return device.target(x.get_device())

    def check_writable(self, x: Any, name: str) -> None:
        """Refuse a tensor that requires grad: its gradients would be those of what was there before.

        torch's own functions with ``out`` do so, too, and its in-place functions if the tensor is a leaf.
        """
        if x.requires_grad and self._torch.is_grad_enabled():
            raise LayoutError(
                f"{name} needs a tensor that does not require grad, or torch.no_grad(), got one that does: "
                "calls have no gradients"
            )

    def always_writable(self, x: Any) -> bool:
        """Return whether the tensor requires no grad; else it is writable in some modes of autograd."""
        return not x.requires_grad

    def signature(self, x: Any) -> tuple[int, Any]:
        """Return the address of a tensor, the properties that `view` checks, and whether it requires grad."""
        if self._modes.active() is not None or not self._modes.plain[type(x)]:
            return 0, None
        try:
            pointer = x.data_ptr()
            if not pointer or pointer % x.itemsize or x.is_neg():
                return pointer, None
            return pointer, (x.dtype, x.shape, x.stride(), x.device, x.requires_grad)
        except RuntimeError:  # sparse, or wrapped by torch.func: `view` raises the error
            return 0, None

    def guard(self, operands: tuple[Any, ...]) -> Callable[..., bool]:
        """Return the guard of torch's compiled graphs: it compares every field that `signature` reads, and more.

        It also compares the dispatch keys of the thread, and so fails inside transforms of torch.func, tracing and
        modes that are not torch's own. It ignores FakeTensorMode and similar modes; `blocked` detects those.
        """
        guards = self._guards()
        assert guards is not None
        check: Callable[..., bool] = guards(*operands, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check

    def allocator(
        self, shape: tuple[int, ...], dtype: str, target: Target, strides: tuple[int, ...] | None = None
    ) -> Allocator:
        """Return a function that allocates such a tensor on each call."""
        self._check_allocating()
        steps = strides_or_contiguous(shape, strides)
        where = self._cpu if target.platform == "host" else self._on(target.device)
        make = partial(self._empty_strided, shape, steps, dtype=self._dtypes[dtype], device=where)
        like = make()
        like.untyped_storage().resize_(0)
        make_alike = partial(self._torch.empty_like, like)  # half a microsecond faster
        if make_alike().stride() == steps:  # false if there are gaps between elements
            make = make_alike
        filled = math.prod(shape) > 0

        def new(stream: int | None) -> tuple[int, Any]:
            if stream is not None:
                return self.empty(shape, dtype, target, steps, stream)
            try:
                array = make()
                pointer: int = array.data_ptr()
            except Exception:
                self._check_allocating()
                raise
            if filled and not pointer:
                raise LayoutError(f"a result needs memory, got a {type(array).__name__} without any")
            return pointer, array

        return new

    def _check_allocating(self) -> None:
        """Refuse to allocate in a mode where torch returns a tensor without memory, or records it in a trace."""
        mode = self._modes.active()
        if mode is not None:
            raise LayoutError(f"a result needs memory, got none inside {mode}")

    def scratch_allocator(self, nbytes: int, target: Target) -> Allocator:
        """Return a function that allocates ``nbytes``; on a device, torch aligns all memory to 512 bytes."""
        if target.platform == "host":
            return super().scratch_allocator(nbytes, target)
        return self.allocator((nbytes,), "uint8", target)

    def bare_memory(self, target: Target) -> tuple[Callable[[int, int], int], Callable[[int], object]] | None:
        """Return torch's allocator functions for other libraries; allocating a tensor takes two microseconds longer.

        They allocate on the current device, so they are used only if there is one device.
        torch.cuda.caching_allocator_alloc calls the first of them, but queries and sets the device each time.
        """
        take = getattr(self._torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)
        give = getattr(self._torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)
        if target.platform != "cuda" or take is None or give is None or device.count() != 1:
            return None
        return take, give

    def stream(self, target: Target) -> int:
        """Return torch's current stream on the device of ``target``."""
        if target.platform == "host" or self._raw_stream is None:
            return 0
        stream: int = self._raw_stream(target.device)
        return stream

    def stream_getter(self, target: Target) -> Callable[[], int]:
        """Return a function that returns torch's current stream on the device of ``target``."""
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
        """Return an uninitialized tensor from torch's allocator, in the pool of ``stream``."""
        self._check_allocating()
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
        cuda, where = self._torch.cuda, self._on(target.device)
        # ExternalStream(0) is one of torch's own streams, not the default one.
        with cuda.stream(cuda.ExternalStream(stream, device=where) if stream else cuda.default_stream(where)):
            return self.empty(shape, dtype, target, strides)

    def keep(self, view: TensorView, stream: int) -> None:
        """Keep the storage of an operand, as `Framework.keep`: the tensor may get another one (``x.data = …``)."""
        super().keep(view._replace(owner=view.owner.untyped_storage()), stream)

    def reinterpret(self, x: Any, dtype: str) -> Any:
        """Return a tensor over the same memory."""
        return x.detach().view(self._dtypes[dtype])


def _guards(torch: Any) -> Any:
    """Return the class of torch's guards; None if torch lacks it, or if it does not behave as expected."""
    guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
    try:
        x, y = torch.zeros(2, 4, 4, device="cpu")
        others = x[:2], x[:, :2], x.t(), x.int(), torch.empty(4, 4, device="meta"), torch.nn.Parameter(y), x.to_sparse()
        check = guards(x, x, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        exact = check(x, y) and not any(check(x, other) for other in others)
    except (TypeError, AttributeError, RuntimeError):
        return None
    return guards if exact else None


def _increment(torch: Any) -> Callable[[tuple[Any, ...]], None]:
    """Return the function that increments the version counters of tensors, except of those made in inference mode.

    The public function, ``torch.autograd.graph.increment_version``, imports a submodule and takes twice as long. Before
    torch 2.7 both functions take one tensor, and refuse a tensor without a counter.
    """
    increment: Callable[[Any], None] = torch._C._increment_version
    with torch.inference_mode():
        uncounted = torch.empty(0, device="cpu")
    try:
        increment((uncounted,))
    except (TypeError, RuntimeError):

        def each(tensors: tuple[Any, ...]) -> None:
            for tensor in tensors:
                if not tensor.is_inference():
                    increment(tensor)

        return each
    return increment


@only_instance
def framework() -> Torch:
    """Return the only instance of `Torch`."""
    return Torch(sys.modules["torch"])
