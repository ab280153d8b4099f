"""Layers of FP8 checkpoints: made before their tensors are loaded, completed afterwards, saved in the file's form."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8core.checkpoint import Layer
from fp8core.checkpoint.disk.files import DTYPES
from fp8core.errors import CheckpointError, DeviceError
from fp8core.torch import Linear
from fp8core.torch.aligned import align_rows_
from fp8core.torch.dispatched import offloaded_value
from fp8core.torch.frozen import without_values
from fp8core.transformers.grouped import GroupedExperts


class Stored(NamedTuple):
    """The form in which a file stores a scale."""

    name: str
    """The tensor's name in the file, without the name of the module."""
    dtype: str
    """The dtype, as safetensors names it."""
    shape: tuple[int, ...]
    widths: tuple[int, ...] = ()
    """For a fused weight with one scale for each layer in it: the number of rows of each layer."""

    def empty(self) -> Tensor:
        """Return a meta tensor of the file's shape and dtype, in whose place the scale can be loaded."""
        return torch.empty(self.shape, dtype=torch_dtype(self.dtype), device="meta")

    def canonical(self, loaded: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a loaded scale as float32, in the shape of a layer's scale."""
        numbers = loaded.detach()
        if numbers.dtype == torch.uint8:
            numbers = numbers.view(torch.float8_e8m0fnu)
        numbers = numbers.to(torch.float32)
        if self.widths:
            rows = torch.tensor(self.widths, device=numbers.device)
            numbers = numbers.reshape(-1).repeat_interleave(rows, output_size=sum(self.widths))
        return numbers.reshape(shape).contiguous()

    def kept(self, scale: Tensor) -> Tensor | None:
        """Return a layer's scale in the file's form, or in float32 if the file's 16-bit dtype would round it.

        Return None if the file's form cannot hold the scale: powers of two, or one number for several rows.
        """
        for one in (self, self._replace(dtype="F32")) if self.dtype in ("BF16", "F16") else (self,):
            made = one.as_stored(scale)
            if made.is_meta or torch.allclose(one.canonical(made, scale.shape), scale, 0, 0, equal_nan=True):
                return made
        return None

    def as_stored(self, scale: Tensor) -> Tensor:
        """Return a layer's scale in the file's form, rounded to its dtype."""
        numbers = scale.detach()
        if self.widths:
            starts = [sum(self.widths[:at]) for at in range(len(self.widths))]
            numbers = numbers.reshape(-1)[starts]
        numbers = numbers.reshape(self.shape)
        if self.dtype == "U8":
            return numbers.to(torch.float8_e8m0fnu).view(torch.uint8)
        return numbers.to(torch_dtype(self.dtype))


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a dtype name of safetensors."""
    known = DTYPES.get(name)
    found = None if known is None else getattr(torch, str(known), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"a checkpoint needs dtypes that torch has, got {name}")
    return found


def safetensors_dtype(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype in safetensors."""
    return next(name for name, known in DTYPES.items() if getattr(torch, str(known), None) == dtype)


def waiting(layer: Layer, linear: nn.Linear, options: dict[str, bool]) -> Linear:
    """Return a layer on the meta device whose parameters have the file's names; `complete` makes it callable.

    Raises:
        CheckpointError: the tensors do not make a layer, its scales have no scheme of `Linear`, or its shape is not
            that of ``linear``.
    """
    fault = layer.fault() or layer.input_fault()
    if fault:
        raise CheckpointError(fault)
    scheme = layer.scheme
    if scheme is None or layer.scale is None:
        raise CheckpointError(
            f"{layer.weight.name} needs scales per tensor, per channel or by blocks of 128x128, got scales by "
            f"{layer.granularity} {tuple(layer.group_shape or ())}: fp8core convert changes them"
        )
    if layer.weight.shape != (linear.out_features, linear.in_features):
        wanted = [linear.out_features, linear.in_features]
        raise CheckpointError(f"{layer.weight.name} needs the shape {wanted}, got {list(layer.weight.shape)}")
    static = layer.input_scale is not None
    if layer.input_scale is not None and scheme == "block":
        raise CheckpointError(
            f"{layer.input_scale.name} needs a weight with scales per tensor or channel, got blocks of 128x128, for "
            "which inputs are scaled by groups of 1x128"
        )
    made = without_values(Linear, linear, scheme=scheme, static=static, weight_dtype=layer.dtype, **options)
    initialized(made)
    stored = {"weight_scale": Stored(_leaf(layer, layer.scale), layer.scale.dtype, layer.scale.shape, layer.widths)}
    if layer.input_scale is not None:
        name = _leaf(layer, layer.input_scale)
        stored["input_scale"] = Stored(name, layer.input_scale.dtype, layer.input_scale.shape)
    made.__dict__["stored"] = stored
    for role, one in stored.items():
        made._parameters.pop(role)
        made.register_parameter(one.name, nn.Parameter(one.empty(), requires_grad=False))
    for other in (layer.input_scale_ub, layer.marker):
        if other is not None:
            carry(made, _leaf(layer, other), other)
    return made


def initialized(layer: Linear) -> None:
    """Mark a layer as initialized: transformers cannot initialize FP8 weights at random."""
    layer._is_hf_initialized = True


def carry(module: nn.Module, name: str, tensor: Any) -> None:
    """Register a buffer for a tensor of the checkpoint that no computation here uses, so that it is saved again."""
    module.register_buffer(name, torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device="meta"))


def complete(name: str, layer: Linear) -> None:
    """Convert the scales that were loaded under the file's names, align the rows of the weight, and freeze the layer.

    Raises:
        DeviceError: the layer was not loaded to a device.
    """
    if any(parameter.is_meta for parameter in layer.parameters()):
        raise DeviceError(f"device_map needs to keep FP8 layers on a device, got {name} offloaded")
    stored: dict[str, Stored] = layer.__dict__.get("stored", {})
    scales = {role: layer._parameters.pop(one.name) for role, one in stored.items()}
    for role, loaded in scales.items():
        assert loaded is not None
        shape = layer.scale_shape if role == "weight_scale" else (1,)
        made = stored[role].canonical(loaded, shape)
        layer.register_parameter(role, nn.Parameter(made, requires_grad=False))
    layer.requires_grad_(False)
    align_rows_(layer.weight)
    bias = layer._parameters["bias"]
    if bias is not None and not getattr(bias, "_is_hf_initialized", False):
        bias.zero_()  # the file has no bias, which transformers reports


def refuse_bad_scales(layers: Mapping[str, Linear]) -> None:
    """Refuse completed layers with a scale that is NaN, infinite (in float32), zero or negative.

    The host waits once for each device: until the least and the largest number of every scale are known.

    Raises:
        CheckpointError: a layer has such a scale.
    """
    placed: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, layer in layers.items():
        for role, stored in layer.__dict__.get("stored", {}).items():
            scale = layer._parameters[role]
            assert scale is not None
            placed[scale.device][f"{name}.{stored.name}"] = scale.detach()
    bad: list[str] = []
    for scales in placed.values():
        ends = torch.stack([end for scale in scales.values() for end in scale.aminmax()]).view(-1, 2).tolist()
        # Both ends are NaN if any number is.
        bad += [
            f"{name} needs finite scales above 0, got {low if not low > 0 else high}"
            for name, (low, high) in zip(scales, ends, strict=True)
            if not 0 < low <= high < math.inf
        ]
    if bad:
        others = f" (and {len(bad) - 1} other scales)" if len(bad) > 1 else ""
        raise CheckpointError(f"{bad[0]}{others}: fp8core verify names all")


def store_scales_(model: nn.Module, state: dict[str, Any]) -> None:
    """Replace the scales in a model's state by those in the form of the files that they were loaded from.

    Raises:
        CheckpointError: a scale has been removed since loading; or it has changed, and the file's form cannot hold it.
    """
    forms: dict[str, dict[str, Stored]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            forms[name] = module.__dict__.get("stored", {})
        elif isinstance(module, GroupedExperts):
            forms |= {f"{name}.{part}": stored for part, stored in module.stored.items()}
    for name, stored in forms.items():
        for role, one in stored.items():
            scale = state.pop(f"{name}.{role}", None)
            if scale is None:
                raise CheckpointError(f"{name}.{role} needs a tensor, as the file has {one.name}, got none")
            kept = offloaded_value(model, f"{name}.{role}") if scale.is_meta else None
            made = one.kept(scale if kept is None else kept)
            if made is None:
                form = f"{one.dtype}{list(one.shape)}"
                raise CheckpointError(
                    f"{name}.{role} needs numbers that {form}, its form in the file, holds, got others"
                )
            state[f"{name}.{one.name}"] = made


def _leaf(layer: Layer, tensor: Any) -> str:
    """Return the part of a tensor's name in the file after the module's name."""
    leaf: str = tensor.name.removeprefix(f"{layer.name}.")
    return leaf
