"""What a checkpoint's configuration claims about its weights, in config.json, hf_quant_config.json or a header."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from fp8core.checkpoint.formats.granularity import Granularity
from fp8core.checkpoint.formats.naming import METADATA, FormatName
from fp8core.checkpoint.formats.selection import check_pattern, matches
from fp8core.problem import BLOCK_128, PER_CHANNEL, PER_TENSOR, GroupShape

Activations = Literal["static", "dynamic"]

MODELOPT_FILE: Final = "hf_quant_config.json"
MISTRAL_FILE: Final = "params.json"
"""The configuration beside Mistral's own files."""
METHODS: Final[Mapping[str, FormatName]] = {
    "fp8": "fp8",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "modelopt",
    "modelopt_fp8": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
    "fbgemm_fp8": "fbgemm_fp8",
    "mxfp8": "mxfp8",
}
"""By quant_method: the format. "fp8" is also AutoFP8's name; the names of the tensors tell the two apart."""
_STRATEGIES: Final[Mapping[str, Granularity]] = {
    "tensor": "tensor",
    "channel": "channel",
    "block": "block",
    "group": "group",
}
_ALGORITHMS: Final[Mapping[str, tuple[Granularity, GroupShape, Activations | None]]] = {
    "FP8": ("tensor", PER_TENSOR, "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("channel", PER_CHANNEL, "dynamic"),
    "FP8_PB_WO": ("block", BLOCK_128, None),
    "FP8_PB_REAL": ("block", BLOCK_128, "dynamic"),
    "MXFP8": ("group", GroupShape(1, 32), "dynamic"),
}
"""By ModelOpt's quant_algo: the weights' granularity and group shape, and how activations are scaled."""


class Claim(NamedTuple):
    """What a configuration says about the quantization; fields that it does not mention are None or empty.

    Examples:
        >>> from fp8core.checkpoint import Claim
        >>> Claim("fp8", "config.json", "fp8").granularities
        frozenset()
    """

    format: FormatName | None
    """None if nothing is claimed, or if the method is not an FP8 method."""
    file: str
    """The source of the claim: the name of a file, or "the header"."""
    variant: str
    """The configuration's own name: quant_method, or the format or algorithm under it."""
    granularities: frozenset[Granularity] = frozenset()
    """Which scales FP8 weights may have: each of them has one of these granularities."""
    group_shape: GroupShape | None = None
    """The group shape of blocks and groups."""
    activations: Activations | None = None
    ignore: tuple[str, ...] = ()
    """Modules that are not quantized, as the configuration lists them: names, or patterns for ModelOpt; in
    compressed-tensors, ``re:`` marks a regular expression."""
    kv_cache: str = ""
    """The format of the KV cache, if that is FP8."""
    transforms: tuple[str, ...] = ()
    """For compressed-tensors: the names of transforms that are applied to inputs or results of layers at run time."""
    layers: Mapping[str, str] = {}
    """For ComfyUI: the format of each layer."""
    targets: tuple[str, ...] = ()
    """For compressed-tensors: classes, names and regular expressions of the modules that are quantized; empty if not
    mentioned."""
    groups: tuple["Claim", ...] = ()
    """For compressed-tensors: the claims about the weights of each of its groups, if there are several."""

    def of(self, module: str) -> "Claim":
        """Return the claim about one module: that of the group that targets it by name or, if none does, by class."""
        named = [one for one in self.groups if one._lists(module, one.targets)]
        of_class = [one for one in self.groups if any(target.endswith("Linear") for target in one.targets)]
        return named[0] if named else of_class[0] if len(of_class) == 1 else self

    def ignores(self, module: str) -> bool:
        """Return whether the configuration says that a module is not quantized."""
        if self.format in ("fp8", "autofp8", "fbgemm_fp8"):  # transformers and vLLM match whole parts of names
            return any(f".{one}." in f".{module}." for one in self.ignore)
        return self._lists(module, self.ignore)

    def covers(self, module: str) -> bool:
        """Return whether a linear layer is quantized according to the configuration."""
        of_class = not self.targets or any(one.endswith("Linear") for one in self.targets)
        return (of_class or self._lists(module, self.targets)) and not self.ignores(module)

    def may_cover(self, module: str) -> bool:
        """Return whether a layer can be quantized according to the configuration, whose targets may be classes."""
        classes = any("." not in one and not one.startswith("re:") for one in self.targets)
        return classes or self.covers(module)

    def _lists(self, module: str, entries: tuple[str, ...]) -> bool:
        if self.format == "compressed-tensors":  # its readers know names and regular expressions
            return any(matches(module, one) if one.startswith("re:") else module == one for one in entries)
        return any(matches(module, one) for one in entries)


NOTHING: Final = Claim(None, "", "")


def claim_of(
    config: Mapping[str, Any],
    modelopt: Mapping[str, Any],
    headers: Iterable[Mapping[str, str]],
    file: str = "config.json",
) -> Claim:
    """Return the claim of a checkpoint.

    Args:
        config: the content of config.json, or an empty mapping.
        modelopt: the content of hf_quant_config.json, or an empty mapping. It is used if config.json has no
            quantization_config.
        headers: the metadata of the safetensors files, used if neither file makes a claim.
        file: the name of the file that holds ``config``.

    Raises:
        CheckpointError: a pattern is a regular expression that does not compile.
    """
    found = section(config)
    if found is None and isinstance(modelopt.get("quantization"), dict):
        found, file = {**modelopt, "quant_method": "modelopt"}, MODELOPT_FILE
    if found is None:
        return _of_headers(headers)
    if isinstance(found.get("quantization"), dict):  # hf_quant_config.json, or its content in config.json
        found = {**found, **found["quantization"]}
    method = str(found.get("quant_method", "")).lower().replace("_tensors", "-tensors")  # as vLLM reads it
    if METHODS.get(method) is None and "quant_algo" in found:  # config_groups say less about the stored scales
        method = "modelopt"
    if not method and "config_groups" in found:
        method = "compressed-tensors"
    readers = {"compressed-tensors": _compressed_tensors, "modelopt": _modelopt, "fbgemm_fp8": _fbgemm, "fp8": _fp8}
    known = METHODS.get(method)
    if known is None:
        return Claim(None, file, method)
    return readers[known](found, file) if known in readers else Claim(known, file, method)


def section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization section of a config.json, or None."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            if isinstance(place.get(name), dict):
                found: Mapping[str, Any] = place[name]
                return found
    return None


def _of_headers(headers: Iterable[Mapping[str, str]]) -> Claim:
    layers: dict[str, str] = {}
    for metadata in headers:
        try:
            stored = json.loads(metadata.get(METADATA, "{}")).get("layers", {})
            layers |= {name: str(one.get("format", "")) for name, one in stored.items()}
        except (ValueError, AttributeError, TypeError):
            return Claim("comfyui", "the header", f"{METADATA} that cannot be read")
    if not layers:
        return NOTHING
    variant = ", ".join(sorted(set(layers.values())))
    fp8 = all(one.startswith("float8") for one in layers.values())
    tensor: frozenset[Granularity] = frozenset({"tensor"}) if fp8 else frozenset()
    return Claim("comfyui", "the header", variant, tensor, layers=layers)


def _patterns(value: Any, what: str = "the configuration's list of modules that are not quantized") -> tuple[str, ...]:
    found = tuple(map(str, value)) if isinstance(value, list) else ()
    for one in found:
        check_pattern(one, what)
    return found


def _pair(value: Any) -> GroupShape | None:
    if isinstance(value, list) and len(value) == 2 and all(map(is_side, value)):
        return GroupShape(*value)
    return None


def is_side(value: Any) -> bool:
    """Return whether a value in a configuration can be a side of a group shape; -1 spans the axis."""
    return type(value) is int and (0 < value < 1 << 31 or value == -1)


def _fields(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _fp8(found: Mapping[str, Any], file: str) -> Claim:
    block = _pair(found.get("weight_block_size"))
    scheme = found.get("activation_scheme")
    return Claim(
        "fp8",
        file,
        f"fp8, scales {found['scale_fmt']}" if found.get("scale_fmt") else "fp8",
        frozenset({"block"}) if block is not None else frozenset({"tensor"}),
        block,
        scheme if scheme in ("static", "dynamic") else None,
        _patterns(found.get("modules_to_not_convert")) or _patterns(found.get("ignored_layers")),
        "fp8" if found.get("kv_cache_scheme") else "",
    )


def _fbgemm(found: Mapping[str, Any], file: str) -> Claim:
    ignore = _patterns(found.get("modules_to_not_convert"))
    return Claim("fbgemm_fp8", file, "fbgemm_fp8", frozenset({"channel"}), None, "dynamic", ignore)


def _compressed_tensors(found: Mapping[str, Any], file: str) -> Claim:
    listed = found.get("config_groups")
    named = [one for one in listed.values() if isinstance(one, dict)] if isinstance(listed, dict) else []
    cache = found.get("kv_cache_scheme")
    claim = Claim(
        "compressed-tensors",
        file,
        str(found.get("format", "compressed-tensors")),
        ignore=_patterns(found.get("ignore")),
        kv_cache=f"{cache.get('type', '')}{cache.get('num_bits', '')}" if isinstance(cache, dict) else "",
        transforms=tuple(_transforms(found.get("transform_config"))),
    )
    each = tuple(
        _of_groups(claim._replace(variant=str(one.get("format") or claim.variant)), [one])
        for one in named
        if _fields(one.get("weights"))
    )
    return _of_groups(claim, named)._replace(groups=each if len(named) > 1 else ())


def _of_groups(claim: Claim, groups: Iterable[Mapping[str, Any]]) -> Claim:
    """Return the claim about the modules of some of compressed-tensors' groups."""
    weights, activations, targets = [], [], list[str]()
    for group in groups:
        weights.append(_fields(group.get("weights")))
        activations.append(_fields(group.get("input_activations")))
        targets += _patterns(group.get("targets"), "targets in the configuration")
    shapes = {_pair(one.get("block_structure")) for one in weights if one.get("strategy") == "block"}
    shapes |= {GroupShape(1, one["group_size"]) for one in weights if is_side(one.get("group_size"))}
    dynamic = {bool(one.get("dynamic")) for one in activations if one}
    return claim._replace(
        granularities=frozenset(
            _STRATEGIES[strategy] for one in weights if (strategy := str(one.get("strategy"))) in _STRATEGIES
        ),
        group_shape=shapes.pop() if len(shapes) == 1 else None,
        activations=("dynamic" if dynamic.pop() else "static") if len(dynamic) == 1 else None,
        targets=tuple(targets),
    )


def _transforms(config: Any) -> Iterator[str]:
    """Yield the names of compressed-tensors' transforms that readers have to apply to activations.

    Those of weights are part of the stored weights, and those of queries cancel with those of keys in their products.
    """
    found: dict[str, set[str]] = {}
    for name, group in _fields(_fields(config).get("config_groups")).items():
        places = _fields(group).get("apply")
        found[name] = {str(_fields(one).get("location")) for one in places} if isinstance(places, list) else {""}
    none = {"weight_input", "weight_output"}
    if {"q_attn", "k_cache"} <= set().union(*found.values()):
        none |= {"q_attn", "k_cache"}
    for name, locations in found.items():
        if not locations <= none:
            yield name


def _modelopt(found: Mapping[str, Any], file: str) -> Claim:
    algorithm = str(found.get("quant_algo", "")).upper()  # ModelOpt writes fp8_pb_wo and fp8_pb_real
    cache = found.get("kv_cache_quant_algo") or found.get("kv_cache_scheme")
    claim = Claim(
        "modelopt",
        file,
        algorithm or "modelopt",
        ignore=_patterns(found.get("exclude_modules")) or _patterns(found.get("ignore")),
        kv_cache=cache if isinstance(cache, str) else ("FP8" if cache else ""),
    )
    if algorithm not in _ALGORITHMS:
        return claim
    granularity, shape, activations = _ALGORITHMS[algorithm]
    return claim._replace(
        granularities=frozenset({granularity}),
        group_shape=shape if granularity in ("block", "group") else None,
        activations=activations,
    )
