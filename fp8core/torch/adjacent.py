"""One tensor over several tensors that are adjacent in memory."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class AdjacentTensors:
    """One tensor over each group of adjacent tensors, kept for the lifetime of the first of the group."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def as_one(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Return one tensor over the rows of all parts, the same object at each call; None if they are not adjacent.

        Threads that ask at the same time may each get a tensor of their own, over the same memory.
        """
        first, rows = parts[0], sum(len(part) for part in parts)
        if not are_adjacent(parts):
            self.forget(first)
            return None
        joint: Tensor | None = self._known.get(first)
        shape = rows, *first.shape[1:]
        if (
            joint is None
            or joint.shape != shape
            or joint.dtype is not first.dtype
            or joint.data_ptr() != first.data_ptr()
        ):
            joint = self._known[first] = over(parts)
        return joint

    def forget(self, first: Tensor) -> None:
        """Drop the joint tensor that begins with ``first``, whose memory is about to be replaced."""
        self._known.pop(first, None)

    def __len__(self) -> int:
        return len(self._known)


def over(parts: Sequence[Tensor]) -> Tensor:
    """Return one tensor over the rows of all parts, which are adjacent."""
    first = parts[0]
    shape = sum(len(part) for part in parts), *first.shape[1:]
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def are_adjacent(parts: Sequence[Tensor]) -> bool:
    """Return whether tensors are contiguous and adjacent, in order, in one storage."""
    at, memory = parts[0].data_ptr(), parts[0].untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.untyped_storage().data_ptr() != memory or not part.is_contiguous():
            return False
        at += part.nbytes
    return True


def with_own_storage(part: Tensor) -> Tensor:
    """Return a tensor over the same memory whose storage holds nothing else; a copy if ``part`` is not contiguous.

    Programs that save tensors treat tensors of one storage as one: accelerate saves only the first of them, and
    safetensors refuses them.
    """
    if not part.is_contiguous():
        return part.contiguous()
    if type(part) is not Tensor or part.is_meta or not part.numel():
        return part
    storage = part.untyped_storage()
    if storage.nbytes() == part.nbytes:
        return part
    begin = part.storage_offset() * part.itemsize
    with torch.inference_mode(part.is_inference()):  # the mode that made the tensor, not that of the caller
        made = torch.empty(0, dtype=part.dtype, device=part.device)
        return made.set_(storage[begin : begin + part.nbytes], 0, part.shape, part.stride())


ADJACENT: Final = AdjacentTensors()
