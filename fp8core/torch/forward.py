"""`ForwardLinear`: the forward of an FP8 layer, prepared for repeated calls, traced by torch, or with gradients."""

from functools import partial
from typing import Any, Final

from torch import Tensor, bfloat16, is_grad_enabled, strided
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fp8core.checkpoint.formats.schemes import SCHEMES
from fp8core.errors import DTypeError, LayoutError, ScaleError
from fp8core.interop import view
from fp8core.ops import Fp8Linear, Quantized, linear
from fp8core.ops.linear import LINEAR_CALLS
from fp8core.problem import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, GroupShape
from fp8core.torch.aligned import by_rows, refuse_gaps_in_exports
from fp8core.torch.dispatched import is_brought
from fp8core.torch.frozen import FrozenLinear, Prepared
from fp8core.torch.gradients import BothModes, StraightThrough, refuse_vmap
from fp8core.torch.input_dtypes import (
    any_autocast,
    as_autocast,
    bias_of_autocast,
    refuse_codes,
    refuse_proxies,
    result_of_codes,
)

INPUTS: Final = {PER_CHANNEL: PER_TOKEN, PER_TENSOR: PER_TENSOR, BLOCK_128: GROUP_128}
"""By the weight's group shape: the group shape of dynamically quantized inputs."""
OPTIONS: Final = "scheme", "use_fast_accum", "batch_invariant"
"""The attributes, beside the parameters, that a prepared call depends on."""


class ForwardLinear(FrozenLinear):
    """The forward of a linear layer with an FP8 weight, for the parameters of `FrozenLinear`."""

    scheme: str
    use_fast_accum: bool
    batch_invariant: bool

    @property
    def weight_group_shape(self) -> GroupShape:
        """The groups of the weight's scales."""
        return SCHEMES[self.scheme].group_shape

    @property
    def group_shape(self) -> GroupShape:
        """The groups of inputs' scales."""
        return INPUTS[self.weight_group_shape] if self.input_scale is None else PER_TENSOR

    def forward(self, input: Any) -> Tensor:  # noqa: A002 - as nn.Linear calls it
        """Return ``input @ weight.T + bias``, ``[..., n]``.

        An input whose rows are not contiguous and evenly spaced, such as a transposed one, is copied first, as in
        nn.Linear. Inside torch.autocast the input is cast to autocast's dtype first, as in nn.Linear.

        Args:
            input: ``[..., k]`` of float32, float16 or bfloat16, or a `Quantized`, whose result has the dtype
                `compute_dtype`, or autocast's.

        Raises:
            LayoutError: while torch.compile traces, inside of torch.vmap or of forward-mode derivatives.
            Fp8Error: as for `fp8core.linear`.
        """
        if any_autocast():
            input = as_autocast(input)  # noqa: A001
        forward_mode = forward_ad._current_level >= 0
        if (forward_mode or is_grad_enabled()) and isinstance(input, Tensor | Quantized):
            if is_compiling():
                if forward_mode:
                    raise LayoutError(
                        "x needs to be outside of torch.func's jvp and dual levels while torch.compile traces"
                    )
                refuse_vmap()
            try:
                bias = self._parameters["bias"]
            except KeyError:
                bias = self.bias
            of_input = isinstance(input, Tensor) and input.requires_grad
            if forward_mode or of_input or (bias is not None and bias.requires_grad):
                function = BothModes if forward_mode else StraightThrough
                made: Tensor = function.apply(input, bias, self)  # type: ignore[no-untyped-call]
                return made
        return self._product(input)

    def _product(self, x: Any) -> Tensor:
        """Return the result of `forward`, without gradients."""
        if is_compiling() or (isinstance(x, Quantized) and result_of_codes(x, self.compute_dtype) != bfloat16):
            return self._traced(x)  # what is prepared gives bfloat16 for codes
        own, kept = self._parameters, self._prepared
        try:
            if (
                kept is None
                or kept[0] is not own["weight"]
                or kept[1] is not own["weight_scale"]
                or kept[2] is not own["bias"]
                or kept[3] is not own["input_scale"]
            ):
                if isinstance(x, Tensor):
                    view(x, LINEAR_CALLS.operands[0])  # first: torch's modes refuse the weight as well
                kept = self._prepare()
        except KeyError:  # torch.nn.utils has a parametrization, or prunes, in the place of a parameter
            return self._traced(x)
        try:
            result: Tensor = kept[4](x)
        except LayoutError:
            if not isinstance(x, Tensor) or x.layout != strided or x.is_contiguous():
                raise
            result = self._product(x.contiguous())
        except DTypeError:
            refuse_proxies(x)
            bias = own["bias"]
            if bias_of_autocast(bias, x) is bias:
                raise
            result = self._traced(x)
        except ScaleError:
            refuse_codes(x)
            raise
        return result

    def _traced(self, x: Any) -> Tensor:
        """Return the product by `fp8core.linear`, which torch can trace and which reads parameters of any kind."""
        refuse_codes(x)
        refuse_gaps_in_exports(self.weight)
        if isinstance(x, Tensor):
            x = by_rows(x)
        made: Tensor = linear(
            x,
            Quantized(self.weight, self.weight_scale, self.weight_group_shape),
            bias=bias_of_autocast(self.bias, x),
            input_scale=None if isinstance(x, Quantized) else self.input_scale,
            group_shape=PER_TOKEN if isinstance(x, Quantized) else self.group_shape,
            out_dtype=result_of_codes(x, self.compute_dtype) if isinstance(x, Quantized) else None,
            use_fast_accum=self.use_fast_accum,
            batch_invariant=self.batch_invariant,
        )
        return made

    def _prepare(self) -> Prepared:
        """Make an `Fp8Linear` of the current parameters, and keep the call of it unless they are there for one call."""
        own = self._parameters
        weight, scale, bias, input_scale = own["weight"], own["weight_scale"], own["bias"], own["input_scale"]
        layer = Fp8Linear(
            Quantized(weight, scale, self.weight_group_shape),
            bias=bias,
            input_scale=input_scale,
            group_shape=self.group_shape,
            use_fast_accum=self.use_fast_accum,
            batch_invariant=self.batch_invariant,
        )
        # With an input scale, `Fp8Linear` would accept FP8 inputs, which a layer of a model has to refuse.
        call = layer.__call__ if input_scale is None else partial(_of_values, layer)
        made = weight, scale, bias, input_scale, call
        if not is_brought(self):  # what is kept would stay in memory after the call
            self._prepared = made
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPTIONS:
            self.__dict__["_prepared"] = None  # it depends on the old value
        super().__setattr__(name, value)


def _of_values(layer: Fp8Linear, x: Any) -> Any:
    """Call a layer with values, refusing FP8 codes."""
    refuse_codes(x)
    return layer(x)
