"""Models that accelerate has dispatched: hooks that it wraps modules in, and weights that it keeps elsewhere."""

from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from fp8core.errors import DeviceError

HOOK: Final = "_hf_hook"
"""Where accelerate keeps the hook by which it wraps a module's forward."""
WRAPPED: Final = "_old_forward"
"""Where it keeps that forward."""
HOOKS: Final = "accelerate.hooks"
"""What makes the new one."""


class Offloaded:
    """The modules of a model whose weights accelerate may bring for each call: by their own hooks, or by a parent's."""

    def __init__(self, model: nn.Module) -> None:
        self._reached: set[int] = set()
        for module in model.modules():
            hooks = _hooks(module)
            if hooks:
                self._reached.add(id(module))
            if any(getattr(hook, "place_submodules", False) for hook in hooks):
                self._reached.update(map(id, module.modules()))

    def __contains__(self, module: nn.Module) -> bool:
        """Return whether accelerate keeps a module's own weights elsewhere now."""
        return id(module) in self._reached and any(x.is_meta for x in module.parameters(recurse=False))

    def refuse(self, name: str, module: nn.Module) -> None:
        """Refuse a module whose weights are elsewhere.

        Raises:
            DeviceError: they are.
        """
        if module in self:
            raise DeviceError(f"model needs its weights in memory, got {name} offloaded by accelerate")


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module's forward is not that of its class, hooks of accelerate aside."""
    forward = vars(module).get("forward")
    if hasattr(module, HOOK) and isinstance(forward, partial) and forward.func.__module__ == HOOKS:
        forward = vars(module).get(WRAPPED)
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def take_hook(made: nn.Module, module: nn.Module) -> None:
    """Wrap a module in the hook of the one that it replaces, so that its inputs go on being brought to its device."""
    hook = getattr(module, HOOK, None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module  # it is there, as the hook is its

        add_hook_to_module(made, hook)


def offloaded_value(model: nn.Module, name: str) -> Tensor | None:
    """Return what accelerate keeps elsewhere of a parameter, by the hook of its module or of a parent; None if none."""
    place = name
    while place:
        place = place.rpartition(".")[0]
        for hook in _hooks(model.get_submodule(place)):
            values = getattr(hook, "weights_map", None)
            if values is not None:
                value: Tensor = values[name.removeprefix(f"{place}.")]
                return value
    return None


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    hook = getattr(module, HOOK, None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))
