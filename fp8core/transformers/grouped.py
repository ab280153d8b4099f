"""Mixtures of experts whose FP8 weights are stacked: two grouped products for all experts, without waiting."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from fp8core.ops import moe_permute, moe_unpermute, silu_and_mul_quant
from fp8core.torch import GroupedLinear, Linear
from fp8core.torch.aligned import by_rows
from fp8core.torch.gradients import any_derivatives, has_tangent
from fp8core.torch.input_dtypes import as_autocast
from fp8core.transformers.experts import DOWN, GATED, PLAIN, Experts
from fp8core.transformers.stacks import Part, load_together, parts_of, save_apart, stacked

SILU: Final = SiLUActivation, nn.SiLU


class GroupedExperts(nn.Module):
    """The experts of one layer, stacked: `fp8core.torch.GroupedLinear` for gate and up together, and for down.

    A call quantizes each token once, runs two grouped products, and waits for nothing, so that it can be captured into
    a CUDA graph and compiled without a graph break. The state has the names of the checkpoint, with a tensor for each
    projection of an expert, as `Experts` has.

    Args:
        experts: experts with FP8 layers that are alike (`can_be_grouped`), whose weights become views of those here.

    Examples:
        `fp8core.transformers.from_pretrained` makes them of experts in FP8, as `group_experts_` does.

        >>> import torch
        >>> from transformers import Qwen3MoeConfig, Qwen3MoeModel
        >>> from fp8core.torch import quantize_model_
        >>> from fp8core.transformers import group_experts_, split_experts_
        >>> sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
        >>> model = Qwen3MoeModel(Qwen3MoeConfig(**sizes, num_experts=2, num_attention_heads=2, num_key_value_heads=2))
        >>> names, report, grouped = split_experts_(model), quantize_model_(model), group_experts_(model)
        >>> experts = model.get_submodule(grouped[0])
        >>> experts.down_proj
        GroupedLinear(groups=2, in_features=16, out_features=32, scheme=channel, weight=float8_e4m3fn)
        >>> experts(torch.ones(3, 32), torch.tensor([[0], [1], [0]]), torch.ones(3, 1)).shape
        torch.Size([3, 32])
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        layout, self.num_experts = experts.layout, len(experts)
        self.layout = layout
        self.stacks = {GATED if len(layout.first) == 2 else PLAIN: layout.first, DOWN: (layout.down,)}
        """The names of the stacked projections, each with those of an expert's projections in it."""
        self._original, self._own_gate = experts._original, experts._own_gate
        self.stored: dict[str, dict[str, Any]] = {}
        """By name of a projection: the form in which a file stores its scales."""
        self.carried: dict[str, Tensor] = {}
        """By name: tensors of the checkpoint that no computation here uses, so that they are saved again."""
        one: Any = experts[0].get_submodule(layout.down)
        self.scheme: str = one.scheme
        for stack, names in self.stacks.items():
            self.add_module(stack, self._stacked(experts, stack, names))
        self.register_state_dict_post_hook(save_apart)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(load_together)  # type: ignore[no-untyped-call]
        self.train(experts.training)

    def _stacked(self, experts: Experts, stack: str, names: Sequence[str]) -> GroupedLinear:
        """Stack these projections of all experts, which are views of the stack from then on.

        So their memory is free before the next ones are stacked, and if there is none, the experts are as before.
        """
        layers: list[list[Any]] = [[expert.get_submodule(name) for name in names] for expert in experts]
        made = stacked(layers)
        for part in parts_of({stack: names}, {stack: made}, self.scheme):
            layer = layers[part.expert][names.index(part.projection)]
            self.stored[part.name] = layer.__dict__.get("stored", {})
            self.carried |= {f"{part.name}.{leaf}": x for leaf, x in layer.named_buffers(recurse=False)}
            part.show(layer, made)
        return made

    @property
    def first(self) -> GroupedLinear:
        """Gate and up together, or up alone."""
        made: Any = self._modules[next(iter(self.stacks))]
        return made  # type: ignore[no-any-return]

    @property
    def down(self) -> GroupedLinear:
        """The projections to the model's width."""
        made: Any = self._modules[DOWN]
        return made  # type: ignore[no-any-return]

    def parts(self) -> Iterator[Part]:
        """Yield the projections of all experts."""
        return parts_of(self.stacks, self._modules, self.scheme)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums of the experts' results: ``[tokens, hidden]`` in the dtype of the input.

        Args:
            hidden_states: ``[tokens, hidden]``.
            top_k_index: ``[tokens, k]``, the experts of each token. Other indices than those of experts are left out.
            top_k_weights: ``[tokens, k]``, the weights of these experts.
        """
        x, index, weights = hidden_states, top_k_index, top_k_weights
        original: Any = self._original[0]
        if any_derivatives() and any(map(_is_differentiated, (x, weights, *original.parameters()))):
            return self._with_gradients(x, index, weights)
        first: Any = self.first
        down: Any = self.down
        static = first.input_scale is not None
        given: Any = as_autocast(by_rows(x))
        dtype = given.dtype
        if not static:
            given = first.quantized(given)  # each token once
        rows, offs, inverse = moe_permute(given, index.contiguous(), self.num_experts)
        group = None
        if static or down.input_scale is not None:
            group = first.group_of_rows(index.numel(), offs)
        if static:
            rows = first.quantized(rows, group=group)
        both = first(rows, offs, dtype)
        if not self._own_gate and len(self.layout.first) == 2 and type(original.act_fn) in SILU:
            form = down.quantization(both.shape[0], group=group)
            inner: Any = silu_and_mul_quant(both, round_intermediate=True, **form)
            y = down(inner, offs, both.dtype)
        else:
            inner = as_autocast(self._activated(both))
            y = down(down.quantized(inner, group=group), offs, inner.dtype)
        summed: Tensor = moe_unpermute(y, inverse, weights.contiguous(), out_dtype=x.dtype)
        return summed

    def _with_gradients(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the result of `forward`, by operations of torch that pass gradients to the input and the weights."""
        (tokens, each), count = index.shape, self.num_experts
        known = (index >= 0) & (index < count)
        expert_of, order = torch.sort(torch.where(known, index, count - 1).reshape(-1), stable=True)
        numbers = torch.arange(count, device=order.device, dtype=expert_of.dtype)
        offs = torch.searchsorted(expert_of, numbers, right=True, out_int32=True)
        # Choices that are left out are zeros of the last expert, whose results and gradients are replaced by zeros.
        kept = known.reshape(-1)[order, None]
        y = self.down(self._activated(self.first(torch.where(kept, x[order // each], 0), offs)), offs)
        apart = torch.empty_like(y).index_copy_(0, order, torch.where(kept, y, 0)).view(tokens, each, y.shape[1])
        shares = torch.where(known, weights, 0).float()
        return (apart * shares[..., None]).sum(1).to(x.dtype)

    def _activated(self, both: Tensor) -> Any:
        """Return the input of the down projections."""
        original: Any = self._original[0]
        if self._own_gate:
            return original._apply_gate(both)
        if len(self.layout.first) == 1:
            return original.act_fn(both)
        gate, up = both.chunk(2, -1)
        return original.act_fn(gate) * up

    def separate(self) -> Experts:
        """Return experts with a layer for each projection, whose weights are views of the stacked ones."""
        experts = [nn.Module() for _ in range(self.num_experts)]
        for part in self.parts():
            stack: Any = self._modules[part.stack]
            options = {"weight_dtype": stack.weight.dtype, "use_fast_accum": stack.use_fast_accum}
            layer = Linear(
                stack.in_features,
                part.end - part.begin,
                False,
                "meta",
                stack.compute_dtype,
                scheme=self.scheme,
                static=stack.input_scale is not None,
                **options,
            )
            part.show(layer, stack)
            if self.stored[part.name]:
                layer.__dict__["stored"] = self.stored[part.name]
            for name, buffer in self.carried.items():
                if name.startswith(f"{part.name}."):
                    layer.register_buffer(name.removeprefix(f"{part.name}."), buffer)
            experts[part.expert].add_module(part.projection, layer)
        return Experts.of(experts, self.layout, self._original, self._own_gate).train(self.training)


def _is_differentiated(x: Tensor) -> bool:
    """Return whether derivatives of the result with respect to ``x`` may be wanted."""
    return (torch.is_grad_enabled() and x.requires_grad) or has_tangent(x)
