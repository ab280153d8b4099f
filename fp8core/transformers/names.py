"""The parameter names that a transformers model has for the tensors of its checkpoint."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

WEIGHT: Final = ".weight"


class Named(NamedTuple):
    """The parameter that a checkpoint's tensor becomes in the model."""

    name: str
    """The parameter that the tensor becomes, or becomes a part of."""
    pattern: str | None = None
    """The source pattern of the converter that joins the tensor with others or splits it, or None."""
    order: int = 0
    """The index of the pattern among the converter's patterns."""


class Names:
    """Maps the names of a checkpoint's tensors to those of a model, as transformers does while it loads them.

    Args:
        model: the model that will be loaded.
        transforms: transformers' conversions for the model (`transforms_of`).
        without: source patterns; converters with one of them are left out.
    """

    def __init__(self, model: Any, transforms: Sequence[Any], without: Collection[str] = ()) -> None:
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter) and not has(one, without)]
        self._order = {pattern: at for one in self._converters for at, pattern in enumerate(one.source_patterns)}
        self.parameters: dict[str, Any] = model.state_dict()
        self._prefix = model.base_model_prefix
        self._tied: dict[str, str] = model.all_tied_weights_keys

    def of(self, key: str) -> Named:
        """Return the parameter that a checkpoint's tensor becomes."""
        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self.parameters)
        if name not in self.parameters and key in self.parameters:
            name, pattern = rename_source_key(key, [], [], self._prefix, self.parameters)
        return Named(name) if pattern is None else Named(name, pattern, self._order[pattern])

    def possible(self, name: str) -> tuple[str, ...]:
        """Return the names that a tensor may have in the model: as it is, without and with the base model's prefix."""
        return name, name.removeprefix(f"{self._prefix}."), f"{self._prefix}.{name}"

    def of_all(self, keys: Iterable[str]) -> dict[str, Named]:
        """Return the parameters that tensors become, by tensor name, in the order in which transformers loads them."""
        return {key: self.of(key) for key in sorted(keys, key=dot_natural_key)}

    def shared(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the parameters among these tensors that the model also puts in place of absent ones; one for each."""
        present = {self.of(key).name for key in keys}
        groups: dict[str, list[str]] = {}
        for name, source in self._tied.items():
            groups.setdefault(source, [source]).append(name)
        found: dict[str, str] = {}
        for names in groups.values():
            absent = next((name for name in names if name not in present), None)
            if absent is not None:
                found |= {name: absent for name in names if name in present}
        return found


def transforms_of(model: Any) -> list[Any]:
    """Return transformers' renamings and converters for a model, which it applies to tensors while loading them."""
    return list(get_model_conversion_mapping(model))


def has(transform: Any, patterns: Collection[str]) -> bool:
    """Return whether a transform is a converter with one of these source patterns."""
    return isinstance(transform, WeightConverter) and any(one in patterns for one in transform.source_patterns)
