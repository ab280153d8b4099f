"""Tensors and FP8 layers as the headers describe them; data is read on request."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from fp8core.checkpoint.disk.files import DTYPES, FP8, Entry, Header, refuse_another, state_of
from fp8core.checkpoint.formats.granularity import E8M0, Granularity, matrices
from fp8core.checkpoint.formats.naming import FormatName
from fp8core.errors import CheckpointError
from fp8core.ops import convert_to_channelwise
from fp8core.problem import BLOCK_128, GroupShape


class Tensor(NamedTuple):
    """A tensor of a file, as the header describes it.

    Examples:
        `open_checkpoint` returns them.

        >>> from fp8core.checkpoint import Tensor
        >>> Tensor._fields
        ('name', 'dtype', 'shape', 'begin', 'nbytes', 'path', 'state', 'pitch')
    """

    name: str
    dtype: str
    """The dtype as safetensors names it, such as "F8_E4M3" or "BF16"."""
    shape: tuple[int, ...]
    begin: int
    """The offset of the data from the start of the file, in bytes."""
    nbytes: int
    path: Path
    """The file."""
    state: tuple[int, int]
    """The file's length in bytes and time of last modification in ns, when its header was read."""
    pitch: int = 0
    """For a matrix whose transpose is stored: the number of elements from a column to the next. 0 for stored rows."""

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def entry(self) -> Entry:
        """The tensor without its file."""
        return Entry(self.name, self.dtype, self.shape, self.begin, self.nbytes, self.pitch)

    def read(self) -> NDArray[Any]:
        """Return the data as a read-only array, mapped from the file, in a dtype of NumPy or ml_dtypes.

        Raises:
            CheckpointError: the file cannot be read, or has changed since its header was read; or NumPy has no such
                dtype.
        """
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise CheckpointError(f"{self.name} of {self.path} needs a dtype that NumPy has, got {self.dtype}")
        if not self.nbytes:
            return np.empty(self.shape, dtype)
        rows, cols = self.shape if self.pitch else (0, 0)
        span = ((cols - 1) * self.pitch + rows) * dtype.itemsize if self.pitch else self.nbytes
        try:
            with self.path.open("rb") as file:
                state = state_of(os.fstat(file.fileno()))
                mapped = np.memmap(file, np.uint8, "r", self.begin, (span,))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {self.name} of {self.path}: {error}") from error
        refuse_another(self.path, state, self.state)
        stored: NDArray[Any] = np.asarray(mapped).view(dtype)
        if not self.pitch:
            return stored.reshape(self.shape)
        return as_strided(stored, self.shape, (dtype.itemsize, self.pitch * dtype.itemsize), writeable=False)


def tensor_of(entry: Entry, header: Header) -> Tensor:
    """Return the tensor of an entry in the header of its file."""
    at = header.path, header.state
    return Tensor(entry.name, entry.dtype, entry.shape, entry.begin, entry.nbytes, *at, entry.pitch)


class Layer(NamedTuple):
    """An FP8 weight and the tensors that belong to it, as the headers describe them; no data is read.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint import open_checkpoint, quantize_checkpoint
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"up.weight": np.ones((64, 32), np.float32)}, f"{folder}/model.safetensors")
        ...     summary = quantize_checkpoint(f"{folder}/model.safetensors", f"{folder}/fp8.safetensors")
        ...     layer = open_checkpoint(f"{folder}/fp8.safetensors").layers["up"]
        ...     largest = float(layer.scales().max())
        >>> layer.granularity, layer.weight.shape, layer.scale.shape, round(largest * 448)
        ('channel', (64, 32), (64, 1), 1)
    """

    name: str
    """The module: the weight's name without ".weight"; for experts stacked in one tensor, the name of that tensor."""
    weight: Tensor
    scale: Tensor | None
    granularity: Granularity | None
    """Which elements share a scale; None if there is no scale or more than one, or if its shape does not match the
    weight. "tensor" without a scale means that the checkpoint was opened as unscaled: codes are values."""
    group_shape: GroupShape | None
    """The rows and columns of each matrix that share a scale, as `fp8core.dequantize` takes them; -1 spans the axis."""
    scale_shape: tuple[int, ...]
    """The shape of the array that `scales` returns."""
    widths: tuple[int, ...]
    """For a fused weight with one scale for each layer in it: the number of rows of each layer; else empty."""
    input_scale: Tensor | None
    input_scale_ub: Tensor | None
    marker: Tensor | None
    """ComfyUI's tensor that describes the layer."""
    format: FormatName
    repeated: tuple[str, ...] = ()
    """The names of two scales of which nothing says which one counts; empty if there are none."""

    @property
    def dtype(self) -> str:
        """The weight's FP8 format as fp8core names it, such as "float8_e4m3fn"."""
        return FP8[self.weight.dtype]

    @property
    def experts(self) -> int | None:
        """The number of experts stacked in the weight, or None if it is one matrix."""
        return matrices(self.weight.name, self.weight.shape).experts

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the weight, or of one expert's."""
        return matrices(self.weight.name, self.weight.shape)[1:]

    @property
    def scheme(self) -> Literal["channel", "tensor", "block"] | None:
        """The scheme of products with the weight: per channel, tensor or 128x128 block; None for other scales."""
        if self.granularity == "block":
            return "block" if self.group_shape == BLOCK_128 else None
        if self.granularity in ("channel", "shard"):
            return "channel"
        return "tensor" if self.granularity == "tensor" else None

    @property
    def scale_kind(self) -> str:
        """The dtype of the stored scales: "float32", "bfloat16", "float16", "float64", "e8m0", or "" without scales."""
        if self.scale is None:
            return ""
        return "e8m0" if self.scale.dtype in E8M0 else str(DTYPES[self.scale.dtype])

    def tensors(self) -> Iterator[Tensor]:
        """Yield the weight, then the tensors that belong to it."""
        yield self.weight
        yield from (one for one in (self.scale, self.input_scale, self.input_scale_ub, self.marker) if one is not None)

    def matrices(self) -> Iterator[Entry]:
        """Yield the matrices of the weight: one, or one for each stacked expert."""
        n, k = self.matrix_shape
        nbytes = n * k
        for begin in range(self.weight.begin, self.weight.begin + self.weight.nbytes, nbytes):
            yield Entry(self.weight.name, self.weight.dtype, (n, k), begin, nbytes, self.weight.pitch)

    def scales(self, expert: int | None = None) -> NDArray[np.float32]:
        """Return the weight's scales as float32, in a shape that does not depend on the file's.

        The shape is ``[1, 1]`` per tensor, ``[n, 1]`` per channel and for fused shards, and ``[n blocks, k blocks]``
        per block or group. For stacked experts, an axis of experts precedes these unless ``expert`` selects one.

        Raises:
            CheckpointError: there is no scale, its shape does not match the weight, or the file cannot be read.
        """
        if self.granularity is None:
            raise CheckpointError(self.fault())
        if self.scale is None:
            return np.ones(self.scale_shape if expert is None else self.scale_shape[-2:], np.float32)
        stored, shape = self.scale.read(), self.scale_shape
        if expert is not None:
            shape = shape[-2:]
            if stored.size > 1 and self.experts is not None:
                stored = stored[expert]
        numbers = as_float32(stored)
        if self.granularity == "shard":
            experts = [convert_to_channelwise(one, self.widths) for one in numbers.reshape(-1, len(self.widths))]
            return np.stack(experts).reshape(shape)
        if numbers.size == 1:
            return np.broadcast_to(numbers.reshape(1), shape).copy()
        return numbers.reshape(shape)

    def fault(self) -> str:
        """Return why the weight cannot be dequantized; empty if it can."""
        if self.granularity is not None:
            return ""
        if self.repeated:
            return f"{self.weight.name} needs one scale of a kind, got {' and '.join(self.repeated)}"
        if self.scale is None:
            return f"{self.weight.name} of {self.weight.path.name} needs a scale, got none"
        what = f"{list(self.scale.shape)} ({self.scale.dtype}) for a weight {list(self.weight.shape)}"
        return f"{self.scale.name} of {self.scale.path.name} needs a shape and dtype that fit a granularity, got {what}"

    def input_fault(self) -> str:
        """Return why no product can use the static scale of its inputs; empty if one can, or there is none."""
        scale = self.input_scale
        if scale is None or self.experts is not None or scale.elements == 1:
            return ""
        return f"{scale.name} needs to be one number, got shape {list(scale.shape)}"


def as_float32(stored: NDArray[Any]) -> NDArray[np.float32]:
    """Return scales as float32: uint8 holds exponents (e8m0), float64 is rounded, other dtypes convert exactly."""
    if stored.dtype == np.uint8:
        stored = stored.view(ml_dtypes.float8_e8m0fnu)
    with np.errstate(over="ignore", invalid="ignore"):  # invalid: signaling NaN
        return np.asarray(stored.astype(np.float32))
