"""Layers of FP8 checkpoints: waiting for their tensors, taking them, and giving them back as the file had them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8core.checkpoint import Layer
from fp8core.checkpoint.files import DTYPES
from fp8core.errors import CheckpointError, DeviceError
from fp8core.torch import Linear
from fp8core.torch.aligned import align_rows_
from fp8core.torch.dispatched import offloaded_value
from fp8core.torch.frozen import without_values


class Stored(NamedTuple):
    """How a file stores a scale."""

    name: str
    """What it calls the tensor, after the name of the module."""
    dtype: str
    """In safetensors' words."""
    shape: tuple[int, ...]
    widths: tuple[int, ...] = ()
    """Of fused weights with a scale for each layer in them: the rows of each."""

    def empty(self) -> Tensor:
        """Return a tensor without memory that such a scale can be loaded into."""
        return torch.empty(self.shape, dtype=torch_dtype(self.dtype), device="meta")

    def canonical(self, loaded: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the numbers in float32, in the shape that a layer has."""
        numbers = loaded.detach()
        if numbers.dtype == torch.uint8:
            numbers = numbers.view(torch.float8_e8m0fnu)
        numbers = numbers.to(torch.float32)
        if self.widths:
            rows = torch.tensor(self.widths, device=numbers.device)
            numbers = numbers.reshape(-1).repeat_interleave(rows, output_size=sum(self.widths))
        return numbers.reshape(shape).contiguous()

    def kept(self, scale: Tensor) -> Tensor | None:
        """Return a layer's scale as the file had it, or in float32 where a 16-bit type would round what it is now.

        None where the file's form cannot hold it: powers of two, or one number for several rows.
        """
        for one in (self, self._replace(dtype="F32")) if self.dtype in ("BF16", "F16") else (self,):
            made = one.as_stored(scale)
            if made.is_meta or torch.allclose(one.canonical(made, scale.shape), scale, 0, 0, equal_nan=True):
                return made
        return None

    def as_stored(self, scale: Tensor) -> Tensor:
        """Return a layer's scale in the file's form, rounded."""
        numbers = scale.detach()
        if self.widths:
            starts = [sum(self.widths[:at]) for at in range(len(self.widths))]
            numbers = numbers.reshape(-1)[starts]
        numbers = numbers.reshape(self.shape)
        if self.dtype == "U8":
            return numbers.to(torch.float8_e8m0fnu).view(torch.uint8)
        return numbers.to(torch_dtype(self.dtype))


def torch_dtype(name: str) -> torch.dtype:
    """Return a dtype of safetensors in torch."""
    known = DTYPES.get(name)
    found = None if known is None else getattr(torch, str(known), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"a checkpoint needs dtypes that torch has, got {name}")
    return found


def safetensors_dtype(dtype: torch.dtype) -> str:
    """Return what safetensors calls a dtype of torch."""
    return next(name for name, known in DTYPES.items() if getattr(torch, str(known), None) == dtype)


def waiting(layer: Layer, linear: nn.Linear, options: dict[str, bool]) -> Linear:
    """Return a layer without values that takes a file's tensors by their own names; `complete` makes it callable.

    Raises:
        CheckpointError: no layer here multiplies by such a weight.
    """
    fault = layer.fault()
    if fault:
        raise CheckpointError(fault)
    scheme = layer.scheme
    if scheme is None or layer.scale is None:
        raise CheckpointError(
            f"{layer.weight.name} needs scales per tensor, per channel or by blocks of 128x128, got them by "
            f"{layer.granularity} {tuple(layer.group_shape or ())}: fp8core convert changes them"
        )
    if layer.weight.shape != (linear.out_features, linear.in_features):
        wanted = [linear.out_features, linear.in_features]
        raise CheckpointError(f"{layer.weight.name} needs the shape {wanted}, got {list(layer.weight.shape)}")
    static = layer.input_scale is not None
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
    """Keep transformers from giving a layer random weights, which it has for no FP8."""
    layer._is_hf_initialized = True


def carry(module: nn.Module, name: str, tensor: Any) -> None:
    """Let a module keep a tensor of the checkpoint that nothing here computes with, so that it is saved again."""
    module.register_buffer(name, torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device="meta"))


def complete(name: str, layer: Linear) -> None:
    """Give a layer its scales from what was loaded under the file's names, and aligned rows; freeze it.

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
        bias.zero_()  # the file has none, of which transformers tells


def as_stored(model: nn.Module) -> dict[str, Any] | None:
    """Return a model's state with scales as the files had them that it was loaded from; None if it has none such.

    Raises:
        CheckpointError: a scale was changed since, and its file's form cannot hold it.
    """
    layers = {name: one for name, one in model.named_modules() if isinstance(one, Linear) and "stored" in one.__dict__}
    if not layers:
        return None
    state = model.state_dict()
    for name, layer in layers.items():
        for role, one in layer.__dict__["stored"].items():
            scale = state.pop(f"{name}.{role}")
            kept = offloaded_value(model, f"{name}.{role}") if scale.is_meta else None
            made = one.kept(scale if kept is None else kept)
            if made is None:
                form = f"{one.dtype}{list(one.shape)}"
                raise CheckpointError(f"{name}.{role} needs numbers that {form} holds, as it was loaded, got others")
            state[f"{name}.{one.name}"] = made
    return state


def _leaf(layer: Layer, tensor: Any) -> str:
    """Return what a file calls a tensor after the module's name."""
    leaf: str = tensor.name.removeprefix(f"{layer.name}.")
    return leaf
