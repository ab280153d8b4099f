"""Models that accelerate has dispatched: its hooks around modules, and the weights that it has offloaded."""

from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from fp8core.errors import DeviceError

HOOK: Final = "_hf_hook"
"""The attribute in which accelerate keeps the hook around a module's forward."""
WRAPPED: Final = "_old_forward"
"""The attribute in which accelerate keeps the forward that the hook wraps."""
HOOKS: Final = "accelerate.hooks"
"""The module that defines the wrapping forward."""


class Offloaded:
    """The modules of a model whose weights accelerate may load at each call, by their own hook or by a parent's."""

    def __init__(self, model: nn.Module) -> None:
        self._reached: set[int] = set()
        for module in model.modules():
            hooks = _hooks(module)
            if hooks:
                self._reached.add(id(module))
            if any(getattr(hook, "place_submodules", False) for hook in hooks):
                self._reached.update(map(id, module.modules()))

    def __contains__(self, module: nn.Module) -> bool:
        """Return whether a module's own weights are offloaded now."""
        return id(module) in self._reached and any(x.is_meta for x in module.parameters(recurse=False))

    def refuse(self, name: str, module: nn.Module) -> None:
        """Refuse a module whose weights are offloaded.

        Raises:
            DeviceError: the weights are offloaded.
        """
        if module in self:
            raise DeviceError(f"model needs its weights in memory, got {name} offloaded by accelerate")


def is_brought(module: nn.Module) -> bool:
    """Return whether accelerate's own hook of a module brings its weights for each call, and drops them after it."""
    return any(getattr(hook, "offload", False) for hook in _hooks(module))


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module's forward, without the hooks of accelerate, is not the forward of its class."""
    forward = vars(module).get("forward")
    if hasattr(module, HOOK) and isinstance(forward, partial) and forward.func.__module__ == HOOKS:
        forward = vars(module).get(WRAPPED)
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def take_hook(made: nn.Module, module: nn.Module) -> None:
    """Wrap ``made`` in accelerate's hook of the module that it replaces, which moves inputs to the module's device."""
    hook = getattr(module, HOOK, None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module  # accelerate is installed: the hook is one of its objects

        add_hook_to_module(made, hook)


def offloaded_value(model: nn.Module, name: str) -> Tensor | None:
    """Return the offloaded value of a parameter, from the hook of its module or of a parent, or None."""
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
