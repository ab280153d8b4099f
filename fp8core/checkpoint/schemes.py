"""What a checkpoint can be quantized to, and how config.json says so."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from fp8core.checkpoint.kinds import numbered, tower_of
from fp8core.core.specs import one_of
from fp8core.errors import CheckpointError
from fp8core.problem import BLOCK_128, PER_CHANNEL, PER_TENSOR, GroupShape, ScaleFormat

WEIGHT: Final = ".weight"
GROUP_MX: Final = GroupShape(1, 32)
"""Of MXFP8."""
OUTSIDE_OF_LAYERS: Final = r"re:(?!(.*\.)?\d+(\.|$))"
"""Matches the names of modules that have no number among their parts."""


class Scheme(NamedTuple):
    """One way to scale weights, and the way to scale activations that goes with it."""

    group_shape: GroupShape
    weights: dict[str, Any]
    activations: dict[str, Any]
    static: bool = False
    """Whether activations have scales in the file."""
    scale_format: ScaleFormat = "float32"
    """How the weights' scales are stored."""
    format: str = "float-quantized"
    """What compressed-tensors calls it."""

    def with_static_activations(self) -> "Scheme":
        """Return the same with one scale in the file for the activations of each layer."""
        return self._replace(activations={"strategy": "tensor"}, static=True)

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
"""How weights are scaled, and activations, in the words of compressed-tensors, by name."""

STATIC: Final = SCHEMES["tensor"].with_static_activations()
"""One scale for each weight, and one that is given for the activations of each layer."""
_OF_MX: Final = {"strategy": "group", "group_size": GROUP_MX.cols, "scale_dtype": "torch.uint8"}
MXFP8: Final = Scheme(GROUP_MX, _OF_MX, _OF_MX, scale_format="ue8m0_bytes", format="mxfp8-quantized")
"""The microscaling format of OCP: an exponent for each 32 numbers of a row. `fp8core.scaled_mm` has no such scales."""


def scheme_to_write(name: str, others: Mapping[str, Scheme] = {}) -> Scheme:
    """Return the scheme of a name for the weights of a file; ``others`` are those that only some callers can do with.

    Raises:
        CheckpointError: the name is none of a scheme.
    """
    known = {**SCHEMES, "static": STATIC, **others}
    if not one_of(name, known):
        raise CheckpointError(f"scheme needs one of {', '.join(known)}, got {name!r}")
    return known[name]


def scheme_of(name: str) -> Scheme:
    """Return the scheme of a name; raises CheckpointError for a name that is none."""
    if not one_of(name, SCHEMES):
        raise CheckpointError(f"scheme needs one of {', '.join(SCHEMES)}, got {name!r}")
    return SCHEMES[name]


def quantization_config(
    scheme: Scheme, kept: Iterable[tuple[str, tuple[int, ...]]], quantized: Iterable[str]
) -> dict[str, Any]:
    """Return what config.json has to hold under "quantization_config", as compressed-tensors and vLLM read it.

    ``ignore`` lists every module whose matrix stays as it was, and lm_head. Heads that are tied to the embedding are
    not stored, and those of a task are new: an expression covers all modules outside of the layers, where none is FP8.
    Layers have one beside their name, and towers instead of it: transformers gives modules other prefixes than
    checkpoints do. So have experts: vLLM asks about ``experts.0.gate_proj`` also where they are stacked, or w1 to w3.

    Args:
        scheme: how weights and activations are scaled.
        kept: name and shape of the tensors that stay.
        quantized: the names of the modules that do not.
    """
    fp8 = set(quantized)
    ignore: set[str] = {"lm_head"} - fp8
    mixed = {tower_of(module) for module in fp8}
    tails = {_from_its_layer(module) for module in fp8}
    mixtures = {_experts_of(module) for module in fp8}
    if all(numbered(module) for module in fp8):
        ignore.add(OUTSIDE_OF_LAYERS)
    for tensor, shape in kept:
        if len(shape) < 2 or not (tensor.endswith(WEIGHT) or len(shape) > 2):
            continue
        name = tensor.removesuffix(WEIGHT)
        tower, experts = tower_of(name), _experts_of(name)
        if tower is not None and tower not in mixed:
            ignore.add(rf"re:(.*\.)?{re.escape(tower)}(\..*)?$")
        elif experts is not None and experts not in mixtures:
            ignore.add(rf"re:{re.escape(experts)}(\..*)?$")
        elif tensor.endswith(WEIGHT):
            ignore.add(name)
            tail = _from_its_layer(name)
            if tail is not None and tail not in tails:
                ignore.add(rf"re:(.*\.)?{re.escape(tail)}$")
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, **scheme.weights, "dynamic": False},
                "input_activations": {**number, **scheme.activations, "dynamic": not scheme.static},
                "output_activations": None,
            }
        },
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
    }


def _experts_of(module: str) -> str | None:
    """Return the module of all experts that a module is in."""
    before, found, _ = f"{module}.".partition(".experts.")
    return f"{before}.experts" if found else None


def _from_its_layer(module: str) -> str | None:
    """Return a module's name from the numbered layer on, which has the same name whatever is before it."""
    parts = module.split(".")
    first = next((at for at, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[first - 1 :]) if first else None


def static_scale(given: Any) -> float | None:
    """Return the scale of a layer's inputs as float32 has it, or None of what is no number above 0 there."""
    if getattr(given, "shape", None) == ():  # of NumPy or torch
        given = given.item()
    if type(given) is bool or not isinstance(given, int | float):
        return None
    try:
        with np.errstate(over="ignore", under="ignore"):
            scale = np.float32(given)
    except OverflowError:  # an integer beyond float64
        return None
    return float(scale) if 0 < scale < np.inf else None
