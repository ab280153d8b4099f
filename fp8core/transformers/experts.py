"""Mixtures of experts with a linear layer for each projection, as checkpoints store them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter
from transformers.integrations import moe

from fp8core.transformers.names import WEIGHT, Named

GATED: Final = "gate_up_proj"
PLAIN: Final = "up_proj"
DOWN: Final = "down_proj"
_DEFAULT_GATE: Final = getattr(moe, "_default_apply_gate", None)
_OF_FP8_EXPERTS: Final = "transformers.integrations.finegrained_fp8"
"""The module of transformers' FP8Experts, whose gate has a form for each family of models."""
_PROBES: Final = (-1e15, -30.0, -1.0, -1e-3, 1e-3, 1.0, 30.0, 1e15)
"""Values of gates and ups at which forms of gates differ: with limits, with softcaps, or with one added."""


class Layout(NamedTuple):
    """The names of an expert's projections in a checkpoint."""

    first: tuple[str, ...]
    """Gate and up, or up alone."""
    down: str
    patterns: tuple[str, ...]
    """The patterns by which transformers' converters match these projections."""


class Experts(nn.ModuleList):
    """The experts of one layer: module ``i`` holds the projections of expert ``i``, under the checkpoint's names.

    A call runs the experts that tokens are routed to, one after the other. It synchronizes once, to read the routing.

    Args:
        original: transformers' module, whose projections are stacked in parameters with three axes. It gives the
            extents, the activation and the gate, and loses its parameters.
        layout: the names of the projections.

    Examples:
        `fp8core.transformers.from_pretrained` makes `Experts` of modules in which transformers stacks experts.

        >>> import torch
        >>> from transformers import Qwen3MoeConfig
        >>> from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
        >>> from fp8core.transformers.experts import Experts, Layout
        >>> config = Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=16, num_experts=2)
        >>> experts = Experts(Qwen3MoeExperts(config), Layout(("gate_proj", "up_proj"), "down_proj", ()))
        >>> experts[1].down_proj
        Linear(in_features=16, out_features=8, bias=False)
    """

    def __init__(self, original: nn.Module, layout: Layout) -> None:
        down = original._parameters[DOWN]
        assert down is not None
        count, hidden, inner = down.shape
        super().__init__(Expert(layout, hidden, inner, down.dtype) for _ in range(count))
        self.layout = layout
        for name in list(original._parameters):
            delattr(original, name)
        self._original = (original,)  # in a tuple, so that it is not a submodule and not part of the state
        self._own_gate = _has_own_gate(original, layout)
        self.train(original.training)

    @classmethod
    def of(cls, experts: Iterable[nn.Module], layout: Layout, original: tuple[nn.Module], own_gate: bool) -> Self:
        """Return experts of modules that hold their projections, which know the rest from another object."""
        made = cls.__new__(cls)
        nn.ModuleList.__init__(made, experts)
        made.layout, made._original, made._own_gate = layout, original, own_gate
        return made

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return len(self)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums of the experts' results: ``[tokens, hidden]`` in the dtype of the input.

        Args:
            hidden_states: ``[tokens, hidden]``.
            top_k_index: ``[tokens, k]``, the experts of each token. Other indices than those of experts are left out.
            top_k_weights: ``[tokens, k]``, the weights of these experts.
        """
        (tokens, each), width = top_k_index.shape, hidden_states.shape[-1]
        expert_of = torch.where(top_k_index < 0, len(self), top_k_index).reshape(-1)
        order = torch.argsort(expert_of, stable=True)
        sizes = torch.bincount(expert_of, minlength=len(self)).tolist()[: len(self)]
        x = hidden_states[order // each]
        made, start = [], 0
        for at, size in enumerate(sizes):
            if size:
                made.append(self._expert(at, x[start : start + size]))
                start += size
        result = torch.zeros(tokens * each, width, dtype=torch.float32, device=hidden_states.device)
        if made:
            used = order[:start]
            weighted = torch.cat(made).float() * top_k_weights.reshape(-1)[used, None]
            result = result.index_copy(0, used, weighted)
        return result.view(tokens, each, width).sum(1).to(hidden_states.dtype)

    def _expert(self, at: int, x: Tensor) -> Tensor:
        expert, original = self[at], self._original[0]
        made = [getattr(expert, name)(x) for name in self.layout.first]
        if self._own_gate:
            inner = original._apply_gate(torch.cat(made, -1))  # type: ignore[operator]
        else:
            inner = original.act_fn(made[0])  # type: ignore[operator]
            inner = inner * made[1] if len(made) == 2 else inner
        y: Tensor = getattr(expert, self.layout.down)(inner)
        return y


class Expert(nn.Module):
    """The projections of one expert, on the meta device until they are loaded; `Experts` calls them."""

    def __init__(self, layout: Layout, hidden: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        wide = torch.bfloat16 if dtype.itemsize == 1 else dtype
        for name in layout.first:
            self.add_module(name, nn.Linear(hidden, inner, False, "meta", wide))
        self.add_module(layout.down, nn.Linear(inner, hidden, False, "meta", wide))


def layouts_of(model: nn.Module, named: Mapping[str, Named]) -> dict[str, Layout]:
    """Return the layouts of the experts that the checkpoint stores one by one and transformers would stack.

    Args:
        model: the model, before any of its modules is replaced.
        named: by name of a checkpoint's tensor: the parameter that it becomes.

    Returns:
        Layouts by the names of the experts' modules.
    """
    found: dict[str, dict[str, dict[int, tuple[str, str]]]] = defaultdict(lambda: defaultdict(dict))
    for key, (name, pattern, order) in named.items():
        if pattern is None or not key.endswith(WEIGHT):
            continue
        module, _, role = name.rpartition(".")
        _, star, projection = pattern.partition("*.")
        if star and role in (GATED, PLAIN, DOWN) and projection.endswith(WEIGHT):
            found[module][role][order] = projection.removesuffix(WEIGHT), pattern
    layouts, modules = {}, dict(model.named_modules())
    for module, roles in found.items():
        first = [one for _, one in sorted((roles.get(GATED) or roles.get(PLAIN) or {}).items())]
        down = list(roles[DOWN].values())
        if first and down and module in modules:  # checkpoints may have layers beyond the model's, such as DeepSeek's
            layout = Layout(tuple(name for name, _ in first), down[0][0], tuple(one for _, one in first + down))
            if fits(modules[module], layout):
                layouts[module] = layout
    return layouts


def layout_of(module: str, transforms: Sequence[Any]) -> Layout | None:
    """Return the layout of a module's experts in checkpoints, or None if transformers does not stack them.

    Args:
        module: the name of the module.
        transforms: transformers' conversions for the model (`transforms_of`).
    """
    found: dict[str, tuple[str, ...]] = {}
    patterns: list[str] = []
    for one in transforms:
        if not isinstance(one, WeightConverter):
            continue
        target = one.target_patterns[0].replace("\\", "").removeprefix(".")
        parts = [pattern.partition("*.")[2] for pattern in one.source_patterns]
        for role in (GATED, PLAIN, DOWN):
            if f".{module}.{role}".endswith(f".{target}") and all(part.endswith(WEIGHT) for part in parts):
                found[role] = tuple(part.removesuffix(WEIGHT) for part in parts)
                patterns += one.source_patterns
    first = found.get(GATED) or found.get(PLAIN)
    if first is None or DOWN not in found:
        return None
    return Layout(first, found[DOWN][0], tuple(patterns))


def fits(original: nn.Module, layout: Layout) -> bool:
    """Return whether `Experts` computes the same as a module: no biases, no transposed or interleaved weights."""
    first = GATED if len(layout.first) == 2 else PLAIN
    own = {name: x.shape for name, x in original._parameters.items() if x is not None}
    activated = hasattr(original, "act_fn") or _has_own_gate(original, layout)
    if set(own) != {first, DOWN} or not activated or len(own[DOWN]) != 3:
        return False
    count, hidden, inner = own[DOWN]
    others = any(True for child in original.children() for _ in child.parameters())
    return (
        tuple(own[first]) == (count, len(layout.first) * inner, hidden)
        and getattr(original, "is_concatenated", True)
        and not getattr(original, "is_transposed", False)
        and not others
    )


def _has_own_gate(original: nn.Module, layout: Layout) -> bool:
    """Return whether a module gates by a function of its own, not by its activation."""
    own = getattr(type(original), "_apply_gate", None)
    if len(layout.first) != 2 or own is None or own is _DEFAULT_GATE:
        return False
    return own.__module__ != _OF_FP8_EXPERTS or not _gates_by_activation(original)


def _gates_by_activation(original: Any) -> bool:
    """Return whether a gate gives the bits that the activation and a product give, whatever its code."""
    values = torch.tensor(_PROBES, device="cpu")
    gate, up = torch.cartesian_prod(values, values).unbind(1)
    return torch.equal(original._apply_gate(torch.cat((gate, up))), original.act_fn(gate) * up)
