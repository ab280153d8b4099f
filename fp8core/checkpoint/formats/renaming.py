"""The names that transformers gives to the layers of a checkpoint while it loads them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fp8core.checkpoint.formats.naming import WEIGHT, module_of
from fp8core.checkpoint.formats.renames import RENAMES, Rules


def rules_for(config: Mapping[str, Any]) -> tuple[Rules, ...]:
    """Return the rules for a model with this config.json: those of its type, and those of nested configurations."""
    types = set(_types(config))
    return tuple(rules for names, rules in RENAMES.items() if not types.isdisjoint(names.split()))


def _types(config: Mapping[str, Any]) -> Iterator[str]:
    found = config.get("model_type")
    if isinstance(found, str):
        yield found
    for nested in config.values():
        if isinstance(nested, dict):
            yield from _types(nested)


def renamed(tensor: str, rules: tuple[Rules, ...]) -> Iterator[str]:
    """Yield the modules that transformers may make of a tensor in place of the one that its name says."""
    for one in rules:
        yield from (module_of(name) for name in _made_of(tensor, one) if name != tensor and name.endswith(WEIGHT))


def split_into(tensor: str, rules: tuple[Rules, ...]) -> int:
    """Return the number of tensors that transformers splits a tensor into; 1 if it does not."""
    return max((len(_made_of(tensor, one)) for one in rules), default=1)


def _made_of(tensor: str, rules: Rules) -> dict[str, None]:
    names = {tensor: None}
    for old, *new in rules:
        names = {re.sub(old, text, name): None for name in names for text in new}
    return names
