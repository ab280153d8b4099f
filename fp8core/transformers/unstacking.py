"""Experts that a checkpoint stores one by one but transformers stacks without a converter, such as those of Llama 4."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers.quantizers import base

from fp8core.errors import CheckpointError
from fp8core.transformers.names import WEIGHT, Names, transforms_of

UNSTACKED: Final[dict[str, Any]] = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})
"""By class name: the unstacked module that transformers itself substitutes for checkpoints of other methods."""


def unstack_experts(model: Any, present: Iterable[str]) -> None:
    """Replace stacked experts by modules with one linear layer per weight, if the checkpoint stores them so.

    Args:
        model: a model before its weights are loaded.
        present: the names of the checkpoint's tensors.

    Raises:
        CheckpointError: the model stacks such experts, and transformers has no unstacked module for them. They would
            get random values, and the checkpoint's weights would be ignored.
    """
    names, modules = Names(model, transforms_of(model)), dict(model.named_modules())
    for key in present:
        name = names.of(key).name
        if not key.endswith(WEIGHT) or name in names.parameters:
            continue
        places = (_stacked_in(one, modules) for one in names.possible(name))
        place = next((one for one in places if one is not None), None)
        if place is None:
            continue  # the model has no such layer, which transformers reports
        known = UNSTACKED.get(type(modules[place]).__name__)
        if known is None:
            raise CheckpointError(
                f"{key} needs a layer of its own in {type(model).__name__}, got experts stacked in {place}"
            )
        with torch.device("meta"):
            modules[place] = known["module_name"](model.config.get_text_config())
        model.set_submodule(place, modules[place])


def _stacked_in(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the name of the module with stacked experts that a weight of one expert belongs to, or None."""
    place = name
    while place not in modules:
        place = place.rpartition(".")[0]
    number = name.removeprefix(f"{place}.").partition(".")[0]
    stacked = any(parameter.ndim == 3 for parameter in modules[place].parameters(recurse=False))
    return place if stacked and number.isdecimal() else None
