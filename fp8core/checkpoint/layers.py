"""Tensors and FP8 layers as the headers describe them; numbers are read when they are asked for."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from fp8core.checkpoint.files import DTYPES, FP8, Entry, refuse_another, state_of
from fp8core.checkpoint.granularity import E8M0, Granularity, matrices
from fp8core.checkpoint.naming import FormatName
from fp8core.errors import CheckpointError
from fp8core.ops import convert_to_channelwise
from fp8core.problem import BLOCK_128, GroupShape


class Tensor(NamedTuple):
    """A tensor of a file: what its header says.

    Examples:
        `open_checkpoint` gives them.

        >>> from fp8core.checkpoint import Tensor
        >>> Tensor._fields
        ('name', 'dtype', 'shape', 'begin', 'nbytes', 'path', 'state', 'pitch')
    """

    name: str
    dtype: str
    """In safetensors' words: "F8_E4M3", "BF16"."""
    shape: tuple[int, ...]
    begin: int
    """Where its bytes begin in the file."""
    nbytes: int
    path: Path
    """The file."""
    state: tuple[int, int]
    """Of the file when its header was read: its length, and when it was last written, in ns."""
    pitch: int = 0
    """Of a matrix whose transpose is stored: the elements from one of its columns to the next. 0 where rows are."""

    @property
    def elements(self) -> int:
        """How many numbers there are."""
        return math.prod(self.shape)

    @property
    def entry(self) -> Entry:
        """What the file's header says, without the file."""
        return Entry(*self[:5], self.pitch)

    def read(self) -> NDArray[Any]:
        """Return the numbers: a read-only array over a mapping of the file, in a dtype of NumPy or ml_dtypes.

        Raises:
            CheckpointError: the file cannot be read, or is another one since its header was read; or NumPy has no such
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


class Layer(NamedTuple):
    """An FP8 weight and what belongs to it: tensors as the headers describe them, nothing read.

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
    """The module: the weight's name without ".weight"; of experts in one tensor, the name of that."""
    weight: Tensor
    scale: Tensor | None
    granularity: Granularity | None
    """How many elements share a scale; None where there is none, or where its shape fits nothing. "tensor" without a
    scale: the checkpoint was opened as unscaled, and codes are values."""
    group_shape: GroupShape | None
    """Rows and columns that share a scale, -1 for all: as `fp8core.dequantize` takes it, for each matrix."""
    scale_shape: tuple[int, ...]
    """Of what `scales` gives."""
    widths: tuple[int, ...]
    """Of fused weights that have a scale for each layer in them: the rows of each; else empty."""
    input_scale: Tensor | None
    input_scale_ub: Tensor | None
    marker: Tensor | None
    """ComfyUI's note on the layer."""
    format: FormatName

    @property
    def dtype(self) -> str:
        """The weight's FP8 format by its name here: "float8_e4m3fn"."""
        return FP8[self.weight.dtype]

    @property
    def experts(self) -> int | None:
        """How many experts are stacked in the weight, or None where it is one matrix."""
        return matrices(self.weight.name, self.weight.shape).experts

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the weight, or of one expert's."""
        return matrices(self.weight.name, self.weight.shape)[1:]

    @property
    def scheme(self) -> Literal["channel", "tensor", "block"] | None:
        """How products with the weight are scaled: per channel, tensor or 128x128; None by anything else."""
        if self.granularity == "block":
            return "block" if self.group_shape == BLOCK_128 else None
        if self.granularity in ("channel", "shard"):
            return "channel"
        return "tensor" if self.granularity == "tensor" else None

    @property
    def scale_kind(self) -> str:
        """How the scales are stored: "float32", "bfloat16", "float16", "float64", "e8m0", or "" without any."""
        if self.scale is None:
            return ""
        return "e8m0" if self.scale.dtype in E8M0 else str(DTYPES[self.scale.dtype])

    def tensors(self) -> Iterator[Tensor]:
        """Give the weight, then what belongs to it."""
        yield self.weight
        yield from (one for one in (self.scale, self.input_scale, self.input_scale_ub, self.marker) if one is not None)

    def matrices(self) -> Iterator[Entry]:
        """Give the weight as matrices: one, or one for each expert."""
        n, k = self.matrix_shape
        nbytes = n * k
        for begin in range(self.weight.begin, self.weight.begin + self.weight.nbytes, nbytes):
            yield Entry(self.weight.name, self.weight.dtype, (n, k), begin, nbytes, self.weight.pitch)

    def scales(self, expert: int | None = None) -> NDArray[np.float32]:
        """Return the weight's scales as float32, in one shape whatever the file's is.

        ``[1, 1]`` per tensor, ``[n, 1]`` per channel and for fused shards, ``[n blocks, k blocks]`` per block or group;
        before these the experts, where they are stacked and no ``expert`` is asked for.

        Raises:
            CheckpointError: there are none, their shape fits the weight by no granularity, or the file cannot be read.
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
        """Return why the weight cannot be read as numbers; empty where it can."""
        if self.granularity is not None:
            return ""
        if self.scale is None:
            return f"{self.weight.name} needs a scale, got none"
        what = f"{list(self.scale.shape)} ({self.scale.dtype}) for a weight {list(self.weight.shape)}"
        return f"{self.scale.name} needs a shape and dtype that fit a granularity, got {what}"


def as_float32(stored: NDArray[Any]) -> NDArray[np.float32]:
    """Return scales as float32: bytes are exponents (e8m0), float64 is rounded, all else is exact."""
    if stored.dtype == np.uint8:
        stored = stored.view(ml_dtypes.float8_e8m0fnu)
    with np.errstate(over="ignore"):
        return np.asarray(stored.astype(np.float32))
