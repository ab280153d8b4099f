"""Experts that a checkpoint stores one by one, and that transformers has stacked and does not convert: Llama 4's."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers.quantizers import base

from fp8core.errors import CheckpointError
from fp8core.transformers.names import WEIGHT, Names, transforms_of

APART: Final[dict[str, Any]] = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})
"""By the name of a class: what transformers puts in its place for checkpoints of other methods, such as Llama 4's."""


def put_apart(model: Any, present: Iterable[str]) -> None:
    """Give a model modules with a linear layer for each weight of its experts, where the checkpoint has them so.

    Args:
        model: without weights yet.
        present: the names of the checkpoint's tensors.

    Raises:
        CheckpointError: the model has stacked experts in the place of such weights, and they cannot be put apart: they
            would get random values, and the checkpoint's would be left out.
    """
    names, modules = Names(model, transforms_of(model)), dict(model.named_modules())
    for key in present:
        named = names.of(key)
        if not key.endswith(WEIGHT) or named.pattern is not None or named.name in names.parameters:
            continue
        places = (_stacked_in(name, modules) for name in names.possible(named.name))
        place = next((one for one in places if one is not None), None)
        if place is None:
            continue  # a layer that the model does not have; transformers tells
        known = APART.get(type(modules[place]).__name__)
        if known is None:
            raise CheckpointError(
                f"{key} needs a layer of its own in {type(model).__name__}, got experts stacked in {place}"
            )
        with torch.device("meta"):
            modules[place] = known["module_name"](model.config.get_text_config())
        model.set_submodule(place, modules[place])


def _stacked_in(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the name of the module that has experts stacked, one of which has a weight of this name; None if none."""
    place = name
    while place not in modules:
        place = place.rpartition(".")[0]
    number = name.removeprefix(f"{place}.").partition(".")[0]
    stacked = any(parameter.ndim == 3 for parameter in modules[place].parameters(recurse=False))
    return place if stacked and number.isdecimal() else None
