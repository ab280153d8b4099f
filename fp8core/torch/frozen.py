"""`FrozenLinear`: the parameters of an FP8 layer, and how they are moved, cast, saved, loaded and copied."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final, NoReturn, Self, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fp8core.errors import DTypeError, LayoutError
from fp8core.forks import ForkSafeLock
from fp8core.interop import dtype_name
from fp8core.problem import FORMATS
from fp8core.torch.aligned import align_rows_
from fp8core.torch.joints import JOINTS, alone

SCALES: Final = "weight_scale", "input_scale"
KEPT: Final = {"weight": tuple(FORMATS), **dict.fromkeys(SCALES, ("float32",))}
"""What no cast of a module changes, and the dtypes that it has."""
Layer = TypeVar("Layer", bound="FrozenLinear")
Prepared = tuple[Any, Any, Any, Any, Callable[[Any], Any]]
"""Parameters, and the call of the layer that was made of them; others make a new one."""


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is FP8 with scales in float32; it says nothing of how it is called."""

    compute_dtype: torch.dtype
    """The dtype that inputs are meant to have, which is cast with the model; PEFT gives it to adapters."""

    weight_scale: nn.Parameter
    input_scale: nn.Parameter | None
    _prepared: Prepared | None

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise LayoutError(
            "torch.nn.DataParallel needs layers that are copied at every call, got one in FP8: "
            "use DistributedDataParallel, or one process for each GPU"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast the parameters, codes and scales as integers, which no cast of a module touches."""
        self._prepared = None
        device = self.weight.device
        kept: list[Tensor] = []
        for name, dtypes in KEPT.items():
            x = self._parameters.get(name)
            if x is not None:
                own = dtype_name(x.dtype)
                if own not in dtypes:
                    raise DTypeError(f"{name} needs {' or '.join(dtypes)}, got {own}: something has cast the parameter")
                JOINTS.forget(x)
                kept.append(x)

        def moved(x: Tensor) -> Tensor:
            if not any(x is one for one in kept):
                return fn(x)
            numbers = x.detach().view(torch.uint8 if x.itemsize == 1 else torch.int32)
            there = fn(numbers)
            if there.dtype != numbers.dtype:  # as `Module.type` casts integers, too
                there = numbers.to(there.device)
            return there.view(x.dtype)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=device)).dtype
        align_rows_(self.weight)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Give tensors that share no storage, and rows without gaps, as files and other programs have them."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in [f"{prefix}{name}" for name in KEPT]:
            if not keep_vars and key in destination:
                destination[key] = alone(destination[key])

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local: Any, strict: Any, missing: Any, unexpected: Any, errors: list[str]
    ) -> None:
        """Refuse a weight that is not FP8, whose cast would lose its scale; scales of bf16 or of shape () are taken."""
        self._prepared = None
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.dtype != self.weight.dtype:
            errors.append(f"{prefix}weight needs {self.weight.dtype}, got {weight.dtype}: load first, quantize then")
            return
        for name in SCALES:
            scale, own = state_dict.get(prefix + name), getattr(self, name)
            if scale is not None and own is not None:
                scale = scale.to(torch.float32)
                state_dict[prefix + name] = scale.reshape(own.shape) if scale.numel() == own.numel() == 1 else scale
        super()._load_from_state_dict(state_dict, prefix, local, strict, missing, unexpected, errors)
        align_rows_(self.weight)

    def __copy__(self) -> Self:
        """Share the parameters, as modules do."""
        made = type(self).__new__(type(self))
        made.__dict__.update({**self.__dict__, "_parameters": dict(self._parameters), "_prepared": None})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the parameters by themselves, so that those which others hold, too, stay one in a copied model."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(deepcopy({**self.__dict__, "_prepared": None}, memo))
        align_rows_(made.weight)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: codes as bytes, as pickle does not know FP8 tensors; no calls prepared."""
        return {
            **self.__dict__,
            "_parameters": {**self._parameters, "weight": _bytes_of(self.weight)},
            "_prepared": None,
            "_codes": self.weight.dtype,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        codes = state.pop("_codes")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight.data = self.weight.data.view(codes)  # the same parameter: another layer may hold it
        if "compute_dtype" not in state:  # pickled before layers kept it: what they took it for then
            bias = self._parameters["bias"]
            self.compute_dtype = torch.bfloat16 if bias is None else bias.dtype
        align_rows_(self.weight)


_BYTES: Final[Any] = WeakIdKeyDictionary()
"""Weak references to the bytes of weights, as long as a pickle or somebody else holds them."""
_LOCK: Final = ForkSafeLock()
"""Of `_BYTES`: threads that pickle layers of one weight at the same time have to find the same bytes, too."""


def _bytes_of(weight: Tensor) -> nn.Parameter:
    """Return a weight's bytes as a parameter, the same for all layers that share it, so that it stays one in a pickle.

    A parameter whose memory was replaced has others.
    """
    made = nn.Parameter(weight.detach().view(torch.uint8), requires_grad=False)
    with _LOCK.held:
        known: nn.Parameter | None = _BYTES.get(weight, lambda: None)()
        if known is not None and _place(known) == _place(made):
            return known
        _BYTES[weight] = ref(made)
    return made


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.device, x.data_ptr(), x.shape, x.stride()


def without_values(kind: type[Layer], linear: nn.Linear, **options: Any) -> Layer:
    """Return a layer of the class in the place of another: of its extents, on the meta device, with no values yet."""
    bias: Tensor | None = linear.bias
    own = linear.weight.dtype
    dtype = own if bias is None else bias.dtype
    made = kind(linear.in_features, linear.out_features, bias is not None, "meta", dtype, **options)
    made.compute_dtype = own
    made.train(linear.training)
    return made
