"""The histories of weights of layers in graphs, which let kernels prefetch the weights (`fp8core.core.prefetch`)."""

from typing import Final
from weakref import ReferenceType, ref

import torch

from fp8core.core.prefetch import WeightHistory


class Histories:
    """One history for each tensor that has been the weight of a layer in a graph, for the lifetime of the tensor."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ReferenceType[torch.Tensor], WeightHistory]] = {}

    def of(self, weight: torch.Tensor) -> WeightHistory:
        """Return the history of a weight.

        Threads that ask at once may get one each: every history is good by itself, as those of two layers of one weight
        are, and the one that is not kept ends with its call.
        """
        number = id(weight)
        known = self._known.get(number)
        if known is not None and known[0]() is weight:
            return known[1]
        made = WeightHistory()
        self._known[number] = ref(weight, lambda gone: self._forget(number, gone)), made
        return made

    def forget(self, weight: torch.Tensor) -> None:
        """Delete the history of a weight, whose memory is about to be replaced: its next call begins another one."""
        self._known.pop(id(weight), None)

    def _forget(self, number: int, gone: ReferenceType[torch.Tensor]) -> None:
        """Delete the history of a tensor that is gone, unless another tensor has its id by now."""
        known = self._known.get(number)
        if known is not None and known[0] is gone:
            self._known.pop(number, None)

    def __len__(self) -> int:
        return len(self._known)


HISTORIES: Final = Histories()
