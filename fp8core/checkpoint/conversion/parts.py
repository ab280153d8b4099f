"""The parts of a conversion's new files: tensors that are copied, and layers that are converted."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

import numpy as np

from fp8core.checkpoint.conversion.changes import STORED, Change, Error, changed
from fp8core.checkpoint.conversion.outputs import Named
from fp8core.checkpoint.disk import writing
from fp8core.checkpoint.disk.files import DTYPES, Piece, copy_tensor, lay_out
from fp8core.checkpoint.reading.layers import Layer, Tensor
from fp8core.checkpoint.reading.values import dequantized

BF16: Final = 2
"""Bytes per element."""


class Part(Protocol):
    """Some tensors of a new file that are written together."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the tensors."""

    def write(self, target: BinaryIO, begins: Mapping[str, int], advance: writing.Advance) -> None:
        """Write the tensors at their offsets; raises OSError if the system does."""


class Copied(NamedTuple):
    """A tensor whose bytes are copied; its name may change, and its axes of extent 1."""

    tensor: Tensor
    named: Named

    def pieces(self) -> Iterator[Piece]:
        """Yield the tensor."""
        yield Piece(self.named.name, self.tensor.dtype, self.named.shape, self.tensor.nbytes)

    def write(self, target: BinaryIO, begins: Mapping[str, int], advance: writing.Advance) -> None:
        """Copy the bytes."""
        with self.tensor.path.open("rb") as source:
            for done in copy_tensor(source, self.tensor.entry, target, begins[self.named.name]):
                advance(self.tensor.name, done)


class Small(NamedTuple):
    """A tensor whose content is in memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: bytes

    def pieces(self) -> Iterator[Piece]:
        """Yield the tensor."""
        yield Piece(self.name, self.dtype, self.shape, len(self.content))

    def write(self, target: BinaryIO, begins: Mapping[str, int], _: writing.Advance) -> None:
        """Write the bytes."""
        writing.put(target, begins[self.name], np.frombuffer(self.content, np.uint8))


class Widened(NamedTuple):
    """A layer that is written as bfloat16: float32(code) * scale, rounded once."""

    layer: Layer

    def pieces(self) -> Iterator[Piece]:
        """Yield the weight."""
        weight = self.layer.weight
        yield Piece(weight.name, "BF16", weight.shape, weight.elements * BF16)

    def write(self, target: BinaryIO, begins: Mapping[str, int], advance: writing.Advance) -> None:
        """Write the dequantized weight."""
        name, (n, k) = self.layer.weight.name, self.layer.matrix_shape
        for index, matrix in enumerate(self.layer.matrices()):
            for first, values in dequantized(self.layer, index, matrix, "bfloat16"):
                writing.put(target, begins[name] + (index * n + first) * k * BF16, values)
                advance(name, values.size)
        for tensor in self.layer.tensors():
            advance(tensor.name, 0 if tensor is self.layer.weight else tensor.nbytes)


class Changed(NamedTuple):
    """A layer that is written as FP8."""

    change: Change
    scale: Named
    errors: dict[str, Error]
    """By weight: the errors of requantized weights; `write` adds that of this layer."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the weight and its scale."""
        weight, dtype = self.change.layer.weight, self.change.scale_dtype
        yield Piece(weight.name, STORED[self.change.goal.dtype], weight.shape, weight.nbytes)
        yield Piece(self.scale.name, dtype, self.scale.shape, self._scale_bytes() * (self.change.layer.experts or 1))

    def _scale_bytes(self) -> int:
        """Return the bytes of the scales of one matrix."""
        rows, cols = self.change.scale_shape
        return rows * cols * DTYPES[self.change.scale_dtype].itemsize

    def write(self, target: BinaryIO, begins: Mapping[str, int], advance: writing.Advance) -> None:
        """Write codes and scales."""
        layer, rows = self.change.layer, max(self.change.goal.group_shape.rows, 0)
        name, (n, k) = layer.weight.name, layer.matrix_shape
        width = self._scale_bytes() // self.change.scale_shape[0]
        difference = norm = 0.0
        for part in changed(self.change):
            writing.put(target, begins[name] + (part.matrix * n + part.first) * k, part.codes)
            row = part.first // rows if rows else 0
            begin = begins[self.scale.name] + part.matrix * self._scale_bytes() + row * width
            writing.put(target, begin, part.scales)
            difference, norm = difference + part.error.difference, norm + part.error.norm
            advance(name, part.nbytes)
        if not self.change.exact:
            self.errors[name] = Error(difference, norm)
        advance(self.scale.name, 0 if layer.scale is None else layer.scale.nbytes)


class ConvertedFile(NamedTuple):
    """One new file."""

    name: str
    parts: Sequence[Part]
    metadata: dict[str, str]
    nbytes: int
    """The bytes of the tensors of the old file."""

    def pieces(self) -> Iterator[Piece]:
        """Yield every tensor of the new file."""
        for part in self.parts:
            yield from part.pieces()

    def size(self) -> int:
        """Return the length of the new file in bytes."""
        return lay_out(self.pieces(), self.metadata)[2]

    def write(self, target: BinaryIO, advance: writing.Advance) -> None:
        """Write the new file; raises OSError if the system does."""
        first, begins, _ = lay_out(self.pieces(), self.metadata)
        target.write(first)
        left = self.nbytes

        def counted(tensor: str, nbytes: int) -> None:
            nonlocal left
            left -= nbytes
            advance(tensor, nbytes)

        for part in self.parts:
            part.write(target, begins, counted)
        advance(self.name, max(left, 0))  # count the tensors that the new file leaves out


def as_bytes(values: Any) -> bytes:
    """Return an array's content."""
    return np.ascontiguousarray(values).tobytes()
