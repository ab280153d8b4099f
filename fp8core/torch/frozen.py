"""`FrozenLinear`: the parameters of an FP8 layer, and how they are moved, cast, saved, loaded and copied."""

from collections.abc import Callable
from typing import Any, Final, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn

from fp8core.errors import DTypeError, LayoutError
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

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: codes as bytes, as pickle does not know FP8 tensors; no calls prepared."""
        codes = self.weight.dtype
        weight = nn.Parameter(self.weight.detach().view(torch.uint8), requires_grad=False)
        return {
            **self.__dict__,
            "_parameters": {**self._parameters, "weight": weight},
            "_prepared": None,
            "_codes": codes,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        codes = state.pop("_codes")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight = nn.Parameter(self.weight.detach().view(codes), requires_grad=False)
        if "compute_dtype" not in state:  # pickled before layers kept it: what they took it for then
            bias = self._parameters["bias"]
            self.compute_dtype = torch.bfloat16 if bias is None else bias.dtype
        align_rows_(self.weight)


def without_values(kind: type[Layer], linear: nn.Linear, **options: Any) -> Layer:
    """Return a layer of the class in the place of another: of its extents, on the meta device, with no values yet."""
    bias: Tensor | None = linear.bias
    own = linear.weight.dtype
    dtype = own if bias is None else bias.dtype
    made = kind(linear.in_features, linear.out_features, bias is not None, "meta", dtype, **options)
    made.compute_dtype = own
    made.train(linear.training)
    return made
