"""What a checkpoint can be quantized to, which of its tensors are, and how config.json says so."""

import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, NamedTuple

from fp8core.checkpoint.files import WIDE, Entry
from fp8core.errors import CheckpointError
from fp8core.problem import BLOCK_128, PER_CHANNEL, PER_TENSOR, GroupShape

SchemeName = Literal["channel", "tensor", "block"]


class Scheme(NamedTuple):
    """One way to scale weights, and the way to scale activations that goes with it."""

    group_shape: GroupShape
    weights: dict[str, Any]
    activations: dict[str, Any]

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [n, k]: [n, 1], [1], or [ceil(n / 128), ceil(k / 128)]."""
        return (1,) if self.group_shape == PER_TENSOR else self.group_shape.scale_shape(*shape)


SCHEMES: Final[dict[str, Scheme]] = {
    "channel": Scheme(PER_CHANNEL, {"strategy": "channel"}, {"strategy": "token"}),
    "tensor": Scheme(PER_TENSOR, {"strategy": "tensor"}, {"strategy": "tensor"}),
    "block": Scheme(
        BLOCK_128,
        {"strategy": "block", "block_structure": [128, 128]},
        {"strategy": "group", "group_size": 128},
    ),
}

NOT_LINEAR: Final = ("*embed*", "*wte", "*wpe", "*norm*", "*lm_head*", "*router*", "*.gate")
"""Modules that are left alone when nobody names what to include: embeddings, norms, heads, expert routers."""


def scheme_of(name: str) -> Scheme:
    """Return the scheme of a name; raises CheckpointError for a name that is none."""
    if name not in SCHEMES:
        raise CheckpointError(f"scheme must be one of {', '.join(SCHEMES)}: got {name!r}")
    return SCHEMES[name]


class Selection(NamedTuple):
    """Which modules are quantized: glob patterns, or regular expressions after ``re:``, over names without ".weight".

    Without ``include`` everything but NOT_LINEAR; with it exactly what it matches; ``exclude`` takes away from both.
    """

    include: tuple[str, ...] | None
    exclude: tuple[str, ...]

    def takes(self, entry: Entry) -> bool:
        """Tell whether a tensor is the weight of a linear layer that is to be quantized."""
        module = module_of(entry)
        if module is None or len(entry.shape) != 2 or entry.dtype not in WIDE or not math.prod(entry.shape):
            return False
        if matches(module, self.exclude):
            return False
        return not matches(module, NOT_LINEAR) if self.include is None else matches(module, self.include)


def selection(include: Sequence[str] | None, exclude: Sequence[str]) -> Selection:
    """Return the selection; raises CheckpointError for a regular expression that does not compile."""
    for pattern in (*(include or ()), *exclude):
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise CheckpointError(f"the pattern {pattern!r} is no regular expression: {error}") from error
    return Selection(None if include is None else tuple(include), tuple(exclude))


def module_of(entry: Entry) -> str | None:
    """Return the module that a tensor is the weight of, or None for any other tensor."""
    return entry.name.removesuffix(".weight") if entry.name.endswith(".weight") else None


def matches(module: str, patterns: Iterable[str]) -> bool:
    """Tell whether a module's name matches one of the patterns."""
    return any(
        re.match(pattern[3:], module) is not None if pattern.startswith("re:") else fnmatchcase(module, pattern)
        for pattern in patterns
    )


def quantization_config(scheme: Scheme, kept: Iterable[Entry], quantized: Iterable[str]) -> dict[str, Any]:
    """Return what config.json has to hold under "quantization_config", as compressed-tensors and vLLM read it.

    ``ignore`` lists every module whose weight stays as it was, and lm_head, which tied checkpoints do not store.
    """
    ignore = {module for entry in kept if len(entry.shape) > 1 and (module := module_of(entry)) is not None}
    ignore |= {"lm_head"} - {name.removesuffix(".weight") for name in quantized}
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, **scheme.weights, "dynamic": False},
                "input_activations": {**number, **scheme.activations, "dynamic": True},
                "output_activations": None,
            }
        },
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
    }
