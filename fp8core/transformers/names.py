"""What a model of transformers calls the tensors of its checkpoint."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

WEIGHT: Final = ".weight"


class Named(NamedTuple):
    """What a tensor becomes in the model."""

    name: str
    """The parameter that it is, or becomes a part of."""
    pattern: str | None = None
    """What the converter finds it by that joins it with others or splits it, if there is one."""
    order: int = 0
    """Which of the converter's patterns this is."""


class Names:
    """The names that a model has for the tensors of a checkpoint, as transformers finds them when it loads them.

    Args:
        model: the model that will be loaded.
        transforms: what transformers does to names and tensors while it loads this model.
        without: patterns whose converters are left out.
    """

    def __init__(self, model: Any, transforms: Sequence[Any], without: Collection[str] = ()) -> None:
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter) and not has(one, without)]
        self._order = {pattern: at for one in self._converters for at, pattern in enumerate(one.source_patterns)}
        self.parameters: dict[str, Any] = model.state_dict()
        self._prefix = model.base_model_prefix

    def of(self, key: str) -> Named:
        """Return what a checkpoint's tensor becomes."""
        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self.parameters)
        return Named(name) if pattern is None else Named(name, pattern, self._order[pattern])

    def possible(self, name: str) -> tuple[str, ...]:
        """Return what a tensor that the model does not have may be called in it, with and without its base's prefix."""
        return name, name.removeprefix(f"{self._prefix}."), f"{self._prefix}.{name}"

    def of_all(self, keys: Iterable[str]) -> dict[str, Named]:
        """Return what tensors become, by their names, in the order in which transformers loads them."""
        return {key: self.of(key) for key in sorted(keys, key=dot_natural_key)}


def transforms_of(model: Any) -> list[Any]:
    """Return what transformers does to names and tensors while it loads a model."""
    return list(get_model_conversion_mapping(model))


def has(transform: Any, patterns: Collection[str]) -> bool:
    """Return whether a transform is a converter that has one of these patterns."""
    return isinstance(transform, WeightConverter) and any(one in patterns for one in transform.source_patterns)
