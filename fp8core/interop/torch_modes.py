"""The modes of torch in which tensors do not stand for their own memory; calls are refused there."""

from collections.abc import Callable
from typing import Any


class Modes:
    """Tells which modes are active on the calling thread: dispatch modes, transforms of torch.func, tracing."""

    def __init__(self, torch: Any) -> None:
        self._c = torch._C
        self.count: Callable[[], int] = torch._C._len_torch_dispatch_stack
        """Returns the number of active dispatch modes, such as FakeTensorMode, FunctionalTensorMode and make_fx's."""
        self._transforms = torch._C._functorch.maybe_current_level
        self._traced = torch._C._get_tracing_state
        self.functional: Callable[[Any], bool] = torch._is_functional_tensor
        self.wrapped: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor
        self.plain = _Plain(torch._C._disabled_torch_dispatch_impl)
        """By class, whether its tensors are ordinary ones; those with __torch_dispatch__ stand for something else."""

    def active(self) -> str | None:
        """Return a description of the active mode, or None."""
        count = self.count()
        if count:
            return type(self._c._get_dispatch_stack_at(count - 1)).__name__
        if self._transforms() is not None:
            return f"torch.func's {self._c._functorch.peek_interpreter_stack().key().name.lower()}"
        if self._traced() is not None:
            return "torch.jit.trace, which would record this result as a constant"
        return None


class _Plain(dict[type, bool]):
    def __init__(self, disabled: object) -> None:
        super().__init__()
        self._disabled = disabled

    def __missing__(self, cls: type) -> bool:
        self[cls] = getattr(cls, "__torch_dispatch__", self._disabled) is self._disabled
        return self[cls]
