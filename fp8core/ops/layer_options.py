"""The options of an `Fp8Linear`, which are fixed when it is made."""

from fp8core.ops.layer_checks import State
from fp8core.problem import GroupShape
from fp8core.types import ActivationName, WideDType


class LayerOptions:
    """The options of a layer: they may be read, and assigning one raises AttributeError, as it would change nothing."""

    _state: State

    @property
    def group_shape(self) -> GroupShape:
        """The group shape by which inputs are quantized."""
        chosen: GroupShape = self._state.options.group_shape
        return chosen

    @property
    def activation(self) -> ActivationName | None:
        """The activation of the results, or None."""
        chosen: ActivationName | None = self._state.options.activation
        return chosen

    @property
    def out_dtype(self) -> WideDType | None:
        """The results' dtype, as it was given; None means that of each input."""
        chosen: WideDType | None = self._state.options.out_dtype
        return chosen

    @property
    def use_fast_accum(self) -> bool:
        """Whether products may accumulate with fewer bits."""
        chosen: bool = self._state.options.use_fast_accum
        return chosen

    @property
    def batch_invariant(self) -> bool:
        """Whether a row of the result has the same bits for every number of rows."""
        chosen: bool = self._state.options.batch_invariant
        return chosen
