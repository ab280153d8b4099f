"""`Frozen`: the parameters of an FP8 layer, and how to move, cast, save, load and copy them."""

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Final, NoReturn, Self, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fp8core.dtypes import FORMATS, HIGH_PRECISION
from fp8core.errors import DTypeError, LayoutError
from fp8core.forks import ForkSafeLock
from fp8core.interop import dtype_name
from fp8core.interop.names import dtype_spelling
from fp8core.torch.adjacent import ADJACENT, with_own_storage
from fp8core.torch.aligned import align_rows_
from fp8core.torch.histories import HISTORIES

SCALES: Final = "weight_scale", "input_scale"
KEPT: Final = {"weight": tuple(FORMATS), **dict.fromkeys(SCALES, ("float32",))}
"""The parameters that no cast of a module changes, and the dtypes that each may have."""
PAIR: Final = "weight", "weight_scale"
"""The parameters that make the weight's values together."""
Layer = TypeVar("Layer", bound="FrozenLinear")
Prepared = tuple[Any, Any, Any, Any, Callable[[Any], Any]]
"""Weight, weight_scale, bias, input_scale, and the callable made from them; it is valid for these objects only."""


class Frozen(nn.Module):
    """The parameters of a layer with an FP8 weight and float32 scales, without a forward of its own."""

    compute_dtype: torch.dtype
    """The dtype of the inputs that the layer expects. Casts of the model change it; PEFT gives it to adapters."""

    weight: Tensor
    weight_scale: nn.Parameter
    input_scale: nn.Parameter | None
    _prepared: Prepared | None = None

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise LayoutError(
            "torch.nn.DataParallel needs layers that it can copy at every call, got an FP8 layer: "
            "use DistributedDataParallel, or one process for each GPU"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast the parameters; codes and scales are passed as integers, which module casts leave alone."""
        self._prepared = None
        device = self.weight.device
        kept: list[Tensor] = []
        for name, dtypes in KEPT.items():
            x = self._parameters.get(name)
            if x is not None:
                own = dtype_name(x.dtype)
                if own not in dtypes:
                    raise DTypeError(f"{name} needs {' or '.join(dtypes)}, got {own}: something has cast the parameter")
                _forget(x)
                kept.append(x)

        def moved(x: Tensor) -> Tensor:
            if not any(x is one for one in kept):
                return fn(x)
            numbers = x.detach().view(torch.uint8 if x.itemsize == 1 else torch.int32)
            there = fn(numbers)
            if there.dtype != numbers.dtype:  # `Module.type` casts integers, too
                there = numbers.to(there.device)
            return there.view(x.dtype)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=device)).dtype
        align_rows_(self.weight)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save contiguous tensors that share no storage, as file formats and other programs expect."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in [f"{prefix}{name}" for name in KEPT]:
            if not keep_vars and key in destination:
                destination[key] = with_own_storage(destination[key])

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local: Any, strict: Any, missing: Any, unexpected: Any, errors: list[str]
    ) -> None:
        """Load a state, accepting scales of bf16 or of shape (), but refuse integers and weights of other dtypes.

        Casting a high-precision weight to FP8 would lose its scale. A state with only one of weight and weight_scale is
        loaded, as the other may follow with the next shard of a checkpoint, but a warning says so: the list of missing
        keys that load_state_dict(strict=False) returns is easily overlooked.
        """
        self._prepared = None
        weight = state_dict.get(prefix + "weight")
        if isinstance(weight, Tensor) and weight.dtype != self.weight.dtype:
            hint = ": load before quantizing" if dtype_spelling(weight.dtype) in HIGH_PRECISION else ""
            errors.append(f"{prefix}weight needs {self.weight.dtype}, got {weight.dtype}{hint}")
            return
        for name in SCALES:
            scale, own = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(scale, Tensor) and own is not None:
                if not scale.is_floating_point():  # bytes of exponents would be read as values
                    errors.append(f"{prefix}{name} needs a floating-point dtype, got {scale.dtype}")
                    return
                scale = scale.to(torch.float32)
                state_dict[prefix + name] = scale.reshape(own.shape) if scale.numel() == own.numel() == 1 else scale
        warn_of_half(state_dict, prefix)
        for x in (self._parameters.get(name) for name in KEPT):
            if x is not None:
                _forget(x)
        super()._load_from_state_dict(state_dict, prefix, local, strict, missing, unexpected, errors)
        align_rows_(self.weight)

    def __copy__(self) -> Self:
        """Return a layer that shares the parameters, and in which others may take their places."""
        made = type(self).__new__(type(self))
        made.__dict__.update({**self.__dict__, "_parameters": dict(self._parameters)})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy each parameter through ``memo``, so that parameters shared by several layers stay shared in the copy."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(deepcopy({**self.__dict__, "_prepared": None}, memo))
        align_rows_(made.weight)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: codes as bytes, as FP8 tensors cannot be pickled, and no prepared call."""
        return {
            **self.__dict__,
            "_parameters": {**self._parameters, "weight": _bytes_of(self.weight)},
            "_prepared": None,
            "_codes": self.weight.dtype,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        codes = state.pop("_codes")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight.data = self.weight.data.view(codes)  # keep the parameter object: another layer may hold it
        if "compute_dtype" not in state:  # a pickle older than this attribute: apply the rule of that release
            bias = self._parameters["bias"]
            self.compute_dtype = torch.bfloat16 if bias is None else bias.dtype
        align_rows_(self.weight)


class FrozenLinear(Frozen, nn.Linear):
    """`Frozen` parameters of ``torch.nn.Linear``."""


_BYTES: Final[Any] = WeakIdKeyDictionary()
"""By weight: a weak reference to the byte parameter that pickles of the weight hold."""
_LOCK: Final = ForkSafeLock()
"""Guards `_BYTES`, so that threads that pickle layers of the same weight at the same time find the same bytes."""


def _bytes_of(weight: Tensor) -> nn.Parameter:
    """Return a weight's bytes as a parameter: the same object for all layers that share the weight.

    So the weight stays shared in a pickle. A weight whose memory has been replaced since gets a new parameter.
    """
    made = nn.Parameter(weight.detach().view(torch.uint8), requires_grad=False)
    with _LOCK.held:
        known: nn.Parameter | None = _BYTES.get(weight, lambda: None)()
        if known is not None and _place(known) == _place(made):
            return known
        _BYTES[weight] = ref(made)
    return made


def _forget(x: Tensor) -> None:
    """Drop what is kept of a parameter whose memory is about to be replaced.

    Where torch swaps parameters (`torch.__future__.set_swap_module_params_on_conversion`), it refuses those that
    anything refers to weakly.
    """
    ADJACENT.forget(x)
    HISTORIES.forget(x)
    with _LOCK.held:
        _BYTES.pop(x, None)


def warn_of_half(state: Mapping[str, Any], prefix: str) -> None:
    """Warn if a state has only one of the two parameters that make a weight's values."""
    loaded = [name for name in PAIR if prefix + name in state]
    if len(loaded) == 1:
        (kept,) = {*PAIR} - {*loaded}
        text = f"{prefix}{loaded[0]} was loaded without {prefix}{kept}: wrong results unless the old one fits"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.device, x.data_ptr(), x.shape, x.stride()


def without_values(kind: type[Layer], linear: nn.Linear, **options: Any) -> Layer:
    """Return a layer of class ``kind`` with the extents, dtypes and mode of ``linear``, on the meta device."""
    bias: Tensor | None = linear.bias
    own = linear.weight.dtype
    dtype = own if bias is None else bias.dtype
    made = kind(linear.in_features, linear.out_features, bias is not None, "meta", dtype, **options)
    made.compute_dtype = own
    made.train(linear.training)
    return made
