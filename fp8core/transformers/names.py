"""What a model of transformers calls the tensors of its checkpoint."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

WEIGHT: Final = ".weight"


class Named(NamedTuple):
    """The name of a tensor in the model."""

    name: str
    pattern: str | None
    """Of what joins the tensor with others, if something does."""


class Names:
    """The names that a model has for the tensors of a checkpoint, as transformers finds them when it loads them.

    Args:
        model: the model that will be loaded.
        transforms: what transformers does to names and tensors while it loads this model.
        without: source patterns of converters to leave out.
    """

    def __init__(self, model: Any, transforms: Sequence[Any], without: Collection[str] = ()) -> None:
        self.renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self.converters = [one for one in transforms if isinstance(one, WeightConverter) and not joins(one, without)]
        self.tensors = model.state_dict()
        self.prefix = model.base_model_prefix

    def of(self, key: str) -> Named:
        """Return the name of a checkpoint's tensor."""
        return Named(*rename_source_key(key, self.renamings, self.converters, self.prefix, self.tensors))

    def of_all(self, keys: Iterable[str]) -> dict[str, Named]:
        """Return the names of tensors, by those in the checkpoint, in the order in which transformers loads them."""
        return {key: self.of(key) for key in sorted(keys, key=dot_natural_key)}


def transforms_of(model: Any) -> list[Any]:
    """Return what transformers does to names and tensors while it loads a model."""
    return list(get_model_conversion_mapping(model))


def joins(transform: Any, patterns: Collection[str]) -> bool:
    """Return whether a transform is a converter that has one of these source patterns."""
    return isinstance(transform, WeightConverter) and any(one in patterns for one in transform.source_patterns)
