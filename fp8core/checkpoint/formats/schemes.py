"""The schemes that checkpoints are quantized with, and their description in config.json."""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fp8core.checkpoint.formats.kinds import IN_TOWER, is_router, modules_with_routers, numbered, tower_of
from fp8core.checkpoint.formats.naming import WEIGHT, module_of
from fp8core.checkpoint.formats.renames import Rules
from fp8core.checkpoint.formats.renaming import renamed, rules_for
from fp8core.core.checks import is_one_of
from fp8core.errors import CheckpointError
from fp8core.problem import BLOCK_128, PER_CHANNEL, PER_TENSOR, GroupShape, ScaleFormat

GROUP_MX: Final = GroupShape(1, 32)
"""The group shape of MXFP8."""
OF_LAYERS: Final = r"\d+(\.|$)"
"""Matches the number of a layer in a module's name."""
_ROUTERS: Final = "gate", "router"
ROUTERS: Final = rf"re:(.*\.)?({'|'.join(_ROUTERS)})$"
"""Matches routers by the names that readers give them: transformers names Phi-MoE's ``gate`` ``router``."""


class Scheme(NamedTuple):
    """How weights are scaled, and the activations that they are multiplied with."""

    group_shape: GroupShape
    weights: dict[str, Any]
    activations: dict[str, Any]
    static: bool = False
    """Whether the file has the scales of activations."""
    scale_format: ScaleFormat = "float32"
    """The format of the weights' scales."""
    format: str = "float-quantized"
    """The name of the format in compressed-tensors."""

    def with_static_activations(self) -> "Scheme":
        """Return the scheme with one scale in the file for the activations of each layer."""
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
"""The schemes by name, in the terms of compressed-tensors; static and mxfp8, which only files have, are not here."""

STATIC: Final = {"static": SCHEMES["tensor"].with_static_activations()}
"""One scale for each weight, and one static scale for the activations of each layer: for files only."""
_OF_MX: Final = {"strategy": "group", "group_size": GROUP_MX.cols, "scale_dtype": "torch.uint8"}
MXFP8: Final = Scheme(GROUP_MX, _OF_MX, _OF_MX, scale_format="ue8m0_bytes", format="mxfp8-quantized")
"""OCP's microscaling format: an exponent for each 32 numbers of a row. `fp8core.scaled_mm` does not support it."""


def scheme_of(name: str, others: Mapping[str, Scheme] = {}) -> Scheme:
    """Return the scheme of a name; ``others`` are schemes that only some callers support.

    Raises:
        CheckpointError: there is no scheme of this name.
    """
    known = {**SCHEMES, **others}
    if not is_one_of(name, known):
        raise CheckpointError(f"scheme needs one of {', '.join(known)}, got {name!r}")
    return known[name]


def quantization_config(
    scheme: Scheme,
    kept: Iterable[tuple[str, tuple[int, ...]]],
    quantized: Iterable[str],
    config: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Return the "quantization_config" for config.json that compressed-tensors and vLLM read.

    Args:
        scheme: the scaling of weights and activations.
        kept: name and shape of each tensor that is not quantized.
        quantized: the names of the quantized modules.
        config: the content of config.json, which says whether transformers renames layers.
    """
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
        "ignore": sorted(_ignored(tuple(kept), frozenset(quantized), rules_for(config))),
        "kv_cache_scheme": None,
    }


def _ignored(kept: Sequence[tuple[str, tuple[int, ...]]], fp8: frozenset[str], rules: tuple[Rules, ...]) -> set[str]:
    """Return the names and patterns of modules that are not quantized: lm_head, and every kept matrix.

    Names alone do not suffice, so there are also regular expressions:

    - one for all modules outside of the numbered layers, if none of them is FP8, but for those that transformers makes
      of layers: heads that are tied to the embedding are not stored, and heads of a task are new;
    - one beside the name of each module that no other pattern has, and one in place of the names of a tower's modules:
      transformers gives modules other prefixes than checkpoints do. A module outside of the towers whose name ends as
      those of FP8 layers in towers alone has one for names outside of towers;
    - one for each other name that transformers gives to a layer (`fp8core.checkpoint.formats.renaming`);
    - one for all routers, if there is one and no FP8 layer has such a name: transformers renames those of some models;
    - one for each mixture of experts: vLLM asks about ``experts.0.gate_proj`` even if experts are stacked, or named w1
      to w3.

    None of them may match an FP8 layer.
    """
    fp8_modules = {name for module in fp8 for name in (module, *renamed(module + WEIGHT, rules))}
    fp8_endings = {ending for name in fp8_modules for ending in _endings(name)}
    outside = {ending for name in fp8_modules if tower_of(name) is None for ending in _endings(name)}
    fp8_towers, fp8_mixtures = {tower_of(name) for name in fp8_modules}, {_experts_of(module) for module in fp8}
    fp8_leaves = {module.rpartition(".")[2] for module in fp8}
    with_routers = modules_with_routers(module_of(tensor) for tensor, _ in kept)
    ignored = {"lm_head"} - fp8_endings
    layers_only = all(map(numbered, fp8))
    if layers_only:
        unnumbered = sorted(re.escape(name) + "$" for name in fp8_modules if not numbered(name))
        ignored.add(rf"re:(?!(.*\.)?({'|'.join((OF_LAYERS, *unnumbered))}))")
    for tensor, shape in kept:
        is_weight, name = tensor.endswith(WEIGHT), module_of(tensor)
        others = () if len(shape) < 2 else tuple(renamed(tensor, rules))
        if not (others or len(shape) > 2 or (is_weight and len(shape) == 2)):
            continue
        experts, parent = _experts_of(name), name.rpartition(".")[0]
        if experts is None and len(shape) == 3 and parent in with_routers:
            experts = f"{parent}.experts"  # as vLLM names them
        for module in (name, *others):
            tower = tower_of(module)
            if tower is not None and tower not in fp8_towers and (numbered(name) or not layers_only):
                ignored.add(rf"re:(.*\.)?{re.escape(tower)}(\..*)?$")
            elif experts is not None and experts not in fp8_mixtures:
                ignored.add(rf"re:{re.escape(experts)}(\..*)?$")
            elif is_weight or module != name:
                if module == name:
                    ignored.add(name)
                if numbered(module) or not layers_only:
                    ignored.update(_with_any_prefix(module, fp8_endings, outside))
                if is_router(module) and fp8_leaves.isdisjoint(_ROUTERS):
                    ignored.add(ROUTERS)
    return ignored


def _with_any_prefix(module: str, fp8_endings: Container[str], outside: Container[str]) -> Iterator[str]:
    """Yield the pattern for a module with any prefix, if there is one that matches no FP8 layer.

    Args:
        module: the name of a module that is not FP8.
        fp8_endings: the endings of the names of FP8 layers.
        outside: those of FP8 layers outside of towers.
    """
    ending = _from_its_layer(module) or module
    if ending not in fp8_endings:
        yield rf"re:(.*\.)?{re.escape(ending)}$"
    elif ending not in outside and tower_of(module) is None:
        yield rf"re:(?!{IN_TOWER})(.*\.)?{re.escape(ending)}$"
    elif module not in fp8_endings:
        yield rf"re:(.*\.)?{re.escape(module)}$"


def _experts_of(module: str) -> str | None:
    """Return the name of the experts' module that a module is in, or None."""
    before, found, _ = f"{module}.".partition(".experts.")
    return f"{before}.experts" if found else None


def _endings(module: str) -> Iterator[str]:
    """Yield a module's name, and what is left of it from each of its parts on."""
    yield module
    while "." in module:
        module = module.partition(".")[2]
        yield module


def _from_its_layer(module: str) -> str | None:
    """Return a module's name from its numbered layer on, which does not depend on the prefix, or None."""
    parts = module.split(".")
    first = next((at for at, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[first - 1 :]) if first else None


def static_scale(given: Any) -> float | None:
    """Return the scale of a layer's inputs, rounded to float32; None if it is not a positive finite number then."""
    if getattr(given, "shape", None) == ():  # a scalar of NumPy or torch
        given = given.item()
    if type(given) is bool or not isinstance(given, int | float):
        return None
    try:
        with np.errstate(over="ignore", under="ignore"):
            scale = np.float32(given)
    except OverflowError:  # an integer beyond float64
        return None
    return float(scale) if 0 < scale < np.inf else None
