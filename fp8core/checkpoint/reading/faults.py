"""Faults of a checkpoint that headers, index and configuration reveal."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from fp8core.checkpoint.disk.files import FLOATS, FP8
from fp8core.checkpoint.formats import kinds
from fp8core.checkpoint.formats.claims import Claim
from fp8core.checkpoint.formats.naming import WEIGHT, module_of, weight_of_scale
from fp8core.checkpoint.reading.layers import Layer
from fp8core.checkpoint.reading.reader import Checkpoint
from fp8core.problem import PER_CHANNEL, PER_TENSOR

FaultKind = Literal[
    "index", "scale missing", "scale shape", "scale left over", "config", "scale value", "NaN code", "scale inverted",
    "scale squared", "scale raised", "difference",
]  # fmt: skip


class Fault(NamedTuple):
    """One fault of a checkpoint.

    Examples:
        >>> from fp8core.checkpoint import Fault
        >>> Fault("up.weight", "NaN code", "3 codes are NaN").tensor
        'up.weight'
    """

    tensor: str
    """The name of the tensor, or of a module in the configuration; empty for a fault of the whole checkpoint."""
    kind: FaultKind
    text: str


def header_faults(checkpoint: Checkpoint) -> Iterator[Fault]:
    """Yield the faults in the headers, and the contradictions between the headers and the configuration."""
    for layer in checkpoint.layers.values():
        fault = layer.fault()
        if layer.repeated:
            yield Fault(layer.repeated[-1], "scale left over", fault)
        elif fault:
            yield Fault(layer.weight.name, "scale missing" if layer.scale is None else "scale shape", fault)
        if layer.input_scale is not None and (input_fault := layer.input_fault()):
            yield Fault(layer.input_scale.name, "scale shape", input_fault)
    yield from left_over(checkpoint)
    yield from _against_claim(checkpoint)


def left_over(checkpoint: Checkpoint) -> Iterator[Fault]:
    """Yield the scales that belong to no FP8 weight."""
    present = checkpoint.all_tensors
    for tensor in checkpoint.tensors():
        name = weight_of_scale(tensor.name)
        if name is None:
            continue
        weight = present.get(name)
        if weight is not None and weight.dtype in FLOATS:
            yield Fault(tensor.name, "scale left over", f"the weight of the scale {tensor.name} is {weight.dtype}")
        elif weight is not None and weight.dtype in FP8 and module_of(name) not in checkpoint.layers:
            got = f"is no matrix, but {weight.dtype} {list(weight.shape)}"
            yield Fault(tensor.name, "scale left over", f"the weight of the scale {tensor.name} {got}")
        elif weight is None and f"{name}_packed" not in present:
            yield Fault(tensor.name, "scale left over", f"the scale {tensor.name} has no weight {name}")


def _against_claim(checkpoint: Checkpoint) -> Iterator[Fault]:
    claim, layers = checkpoint.claim, checkpoint.layers
    if claim.format is None:
        configured = claim.file or checkpoint.format == "comfyui"  # which needs no configuration
        if layers and not configured and checkpoint.source.is_folder and checkpoint.config:
            first = next(iter(layers.values())).weight.name
            found = f"{first} is FP8" if len(layers) == 1 else f"{len(layers):,} weights are FP8, {first} among them"
            text = f"config.json names no quantization, but {found}"
            yield Fault(first, "config", text)
        return
    fp8 = claim.format != "compressed-tensors" or "float" in claim.variant or "fp8" in claim.variant
    if not layers and fp8 and claim.granularities:
        yield Fault("", "config", f"{claim.file} says {claim.variant}, but no weight is FP8")
    for layer in layers.values():
        text = _mismatch(checkpoint, layer)
        if text:
            yield Fault(layer.weight.name, "config", text)
    for module, dtype in claim.layers.items():
        if module not in layers and dtype.startswith("float8"):
            yield Fault(f"{module}.weight", "config", f"{claim.file} says that {module} is {dtype}, but it is not FP8")
    if claim.format == "compressed-tensors" and layers:
        yield from _not_ignored(checkpoint)


def _mismatch(checkpoint: Checkpoint, layer: Layer) -> str:
    """Return how the configuration contradicts a layer; empty if it does not."""
    claim, name = checkpoint.claim, layer.weight.name
    if claim.ignores(layer.name):
        return f"{claim.file} says that {layer.name} is not quantized, but it is FP8"
    if not claim.may_cover(layer.name):
        return f"{layer.name} is FP8, but no target in {claim.file} matches it"
    claim = claim.of(layer.name)
    if claim.variant == "int-quantized":
        return f"{claim.file} says {claim.variant}, but {name} is FP8"
    if layer.granularity is None:
        return ""
    granularity = "tensor" if layer.granularity == "shard" else layer.granularity
    if granularity == "column" and layer.experts is not None:  # stored [in, out], so that columns are output channels
        granularity = "channel"
    wanted = " or ".join(sorted(claim.granularities))
    if claim.granularities and granularity not in claim.granularities and not _same_groups(claim, layer):
        return f"{claim.file} says one scale per {wanted}, but {name} has one per {layer.granularity}"
    others = other_groups(claim, layer)
    if others:
        return others
    if claim.activations == "static" and layer.input_scale is None:
        return f"{claim.file} says that scales of activations are static, but {layer.name} has none"
    if claim.activations == "dynamic" and layer.input_scale is not None:
        return f"{claim.file} says that scales of activations are dynamic, but there is {layer.input_scale.name}"
    return ""


def other_groups(claim: Claim, layer: Layer) -> str:
    """Return how a layer's blocks or groups differ from those of the claim about it; empty if they do not."""
    if claim.group_shape in (None, layer.group_shape) or layer.granularity not in ("block", "group"):
        return ""
    claimed, found = ("x".join(map(str, shape or ())) for shape in (claim.group_shape, layer.group_shape))
    wanted = f"{layer.granularity}s of {claimed}, as {claim.file} says"
    return f"{layer.weight.name} needs {wanted}, got a scale that fits {found}"


def _same_groups(claim: Claim, layer: Layer) -> bool:
    """Return whether a claimed granularity gives the same groups, as per tensor and per channel do for one row."""
    groups = {"tensor": PER_TENSOR, "channel": PER_CHANNEL, "block": claim.group_shape, "group": claim.group_shape}
    found = (groups.get(one) for one in claim.granularities)
    return any(one is not None and one.scale_shape(*layer.matrix_shape) == layer.scale_shape[-2:] for one in found)


def _not_ignored(checkpoint: Checkpoint) -> Iterator[Fault]:
    """Yield the linear layers that are not FP8 but that readers of compressed-tensors would read as FP8."""
    tensors = [one for one in checkpoint.tensors() if one.dtype in FLOATS and len(one.shape) == 2]
    modules = {module_of(one.name): one for one in tensors if one.name.endswith(WEIGHT)}
    names = kinds.names_of([*modules, *checkpoint.layers], checkpoint.all_tensors, checkpoint.config)
    claim = checkpoint.claim
    for module, tensor in modules.items():
        if kinds.kind_of(module, tensor.shape, names) is kinds.LINEAR and claim.covers(module):
            text = f"{tensor.name} is {tensor.dtype}, but {claim.file} does not list {module} under ignore"
            yield Fault(tensor.name, "config", text)
