"""Stacked projections of experts, and their state, which has a tensor for each projection of an expert."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8core.problem import BLOCK_128
from fp8core.torch import GroupedLinear, Linear
from fp8core.torch.adjacent import are_adjacent, over, with_own_storage
from fp8core.torch.aligned import align_rows_
from fp8core.torch.frozen import KEPT, warn_of_half


class Part(NamedTuple):
    """A projection of one expert: a part of the rows of a stacked weight."""

    expert: int
    projection: str
    stack: str
    """The stacked projections of which it is a part."""
    begin: int
    end: int
    """Its rows there."""
    scheme: str
    """The scheme of its scales; stacked ones by tensor are repeated for each channel."""

    @property
    def name(self) -> str:
        """Its name in the state of the experts."""
        return f"{self.expert}.{self.projection}"

    def of(self, role: str, stacked: Tensor) -> Tensor:
        """Return what the projection has of a stacked parameter, such as ``weight_scale``: a view."""
        if role == "input_scale":
            return stacked[self.expert : self.expert + 1]
        if role == "weight_scale" and self.scheme == "tensor":
            return stacked[self.expert, self.begin, :1]
        size = BLOCK_128[0] if role == "weight_scale" and self.scheme == "block" else 1
        return stacked[self.expert, self.begin // size : -(-self.end // size)]

    def show(self, layer: nn.Module, stacked: GroupedLinear) -> None:
        """Make the parameters of a layer views of those of a stack."""
        for role, parameter in stacked.named_parameters():
            setattr(layer, role, nn.Parameter(self.of(role, parameter.detach()), requires_grad=False))

    def fill(self, role: str, stacked: Tensor, value: Tensor) -> str | None:
        """Copy a value to its place in a stacked parameter; return what is wrong with it, or None."""
        place = self.of(role, stacked)
        given = value.reshape(place.shape) if value.numel() == place.numel() == 1 else value
        alike = given.dtype == place.dtype or (role != "weight" and given.is_floating_point())
        if given.shape != place.shape or not alike:
            wanted, got = (f"{x.dtype}{list(x.shape)}" for x in (place, value))
            return f"{self.name}.{role} needs {wanted}, got {got}"
        if role == "weight_scale" and self.scheme == "tensor":
            place = stacked[self.expert, self.begin : self.end]
        place.copy_(given)
        return None

    def other(self, stacked: Tensor, value: Tensor) -> str | None:
        """Return what is wrong with a static scale that has been copied, if the next projection has another."""
        kept = self.of("input_scale", stacked)
        if kept.is_meta or value.is_meta or float(kept) == float(value):
            return None
        return f"{self.name}.input_scale needs {float(kept)}, which {self.stack} has in common, got {float(value)}"


def stacked(layers: Sequence[Sequence[Linear]]) -> GroupedLinear:
    """Return the layers of a projection, one list for each expert, as one."""
    one, n = layers[0][0], sum(layer.out_features for layer in layers[0])
    scheme = "channel" if one.scheme == "tensor" else one.scheme
    options: dict[str, Any] = {"weight_dtype": one.weight.dtype, "use_fast_accum": one.use_fast_accum}
    static = one.input_scale is not None
    made = GroupedLinear(
        len(layers), one.in_features, n, "meta", one.compute_dtype, scheme=scheme, static=static, **options
    )
    every = [layer for expert in layers for layer in expert]
    codes = _one_after_the_other([layer.weight.detach() for layer in every])
    made.weight = nn.Parameter(codes.view(made.weight.shape), requires_grad=False)
    align_rows_(made.weight)
    scales = [layer.weight_scale.detach() for layer in every]
    if one.scheme == "tensor":
        scales = [scale.expand(layer.out_features, 1) for scale, layer in zip(scales, every, strict=True)]
    joint = _one_after_the_other(scales).view(made.weight_scale.shape)
    made.weight_scale = nn.Parameter(joint, requires_grad=False)
    if static:
        inputs = torch.cat([expert[0].input_scale.detach() for expert in layers])  # type: ignore[union-attr]
        made.input_scale = nn.Parameter(inputs, requires_grad=False)
    return made


def _one_after_the_other(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts as one tensor: a view if they follow each other in memory."""
    if are_adjacent(parts):
        return over(parts)
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def parts_of(stacks: Mapping[str, Sequence[str]], layers: Mapping[str, Any], scheme: str) -> Iterator[Part]:
    """Yield the projections of all experts.

    Args:
        stacks: the names of the stacked projections, each with those of an expert's projections in it.
        layers: the `GroupedLinear` of these names.
        scheme: the scheme of the projections' scales.
    """
    for stack, names in stacks.items():
        layer: GroupedLinear = layers[stack]
        rows = layer.out_features // len(names)
        for expert in range(layer.groups):
            for at, name in enumerate(names):
                yield Part(expert, name, stack, at * rows, (at + 1) * rows, scheme)


def save_apart(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace the stacked tensors in a state by those of each projection: a hook of ``state_dict``."""
    stacked = {(stack, role): state.pop(f"{prefix}{stack}.{role}", None) for stack in module.stacks for role in KEPT}
    for part in module.parts():
        for role in KEPT:
            whole = stacked[part.stack, role]
            if whole is not None:
                own = part.of(role, whole)
                own = own.clone() if role == "input_scale" else own  # gate and up have it in common
                state[f"{prefix}{part.name}.{role}"] = with_own_storage(own)
    state |= {f"{prefix}{name}": x for name, x in module.carried.items()}


def load_together(
    module: Any,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Replace the tensors of each projection in a state by stacked ones, which are loaded next: a hook."""
    del metadata, strict, unexpected
    for name in module.carried:
        given = state.pop(f"{prefix}{name}", None)
        if given is None:
            missing.append(f"{prefix}{name}")
        else:
            module.carried[name] = given.detach().clone()
    parts = list(module.parts())
    for part in parts:
        warn_of_half(state, f"{prefix}{part.name}.")
    for stack in module.stacks:
        for role, own in module.get_submodule(stack).named_parameters():
            given = {part: state.pop(f"{prefix}{part.name}.{role}", None) for part in parts if part.stack == stack}
            values = {part: value for part, value in given.items() if value is not None}
            if not values:
                continue  # what is stacked is missing then
            missing += [f"{prefix}{part.name}.{role}" for part in given if part not in values]
            device = next(iter(values.values())).device
            whole = own.detach().clone()
            if own.is_meta:  # values are assigned, not copied
                whole = torch.empty_like(own, device=device)
                whole.view(torch.uint8).zero_()
            faults = [part.fill(role, whole, value) for part, value in values.items()]
            if role == "input_scale" and not any(faults):  # gate and up have it in common
                faults = [part.other(whole, value) for part, value in values.items()]
            errors += [f"{prefix}{fault}" for fault in faults if fault is not None]
            state[f"{prefix}{stack}.{role}"] = whole
