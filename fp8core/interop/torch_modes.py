"""The modes of torch in which tensors are not what they seem: calls there are refused, not recorded and not run."""

from collections.abc import Callable
from typing import Any


class Modes:
    """What the calling thread is inside of: dispatch modes, transforms of torch.func, tracing."""

    def __init__(self, torch: Any) -> None:
        self._c = torch._C
        self.count: Callable[[], int] = torch._C._len_torch_dispatch_stack
        """How many dispatch modes are active, as FakeTensorMode, FunctionalTensorMode and make_fx's."""
        self._transforms = torch._C._functorch.maybe_current_level
        self._traced = torch._C._get_tracing_state
        self.functional: Callable[[Any], bool] = torch._is_functional_tensor
        self.plain = _Plain(torch._C._disabled_torch_dispatch_impl)
        """Whether the tensors of a class are themselves: those with __torch_dispatch__ stand for something else."""

    def active(self) -> str | None:
        """Return what the thread is inside of, in words, or None."""
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
