"""The gradients of layers, computed with their dequantized weights."""

from collections.abc import Sequence
from typing import Any, Final, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fp8core.errors import LayoutError
from fp8core.ops import dequantize
from fp8core.problem import GroupShape
from fp8core.torch.aligned import exporting
from fp8core.torch.operators import LIBRARY, TAGS


class Layer(Protocol):
    """The part of a layer that the gradients use."""

    @property
    def weight_group_shape(self) -> GroupShape:
        """The groups of the weight's scales."""

    def _product(self, x: Any) -> Tensor:
        """Return the layer's product, without gradients."""


def _refuse_batches(*_: Any) -> NoReturn:
    """Refuse the derivatives of a batch: torch would name the class of a layer's gradients, and not x.

    Raises:
        LayoutError: always.
    """
    raise LayoutError("x needs to be outside of torch.func's vmap: pass a batch as the leading axes of x")


class StraightThrough(torch.autograd.Function):
    """A layer's product, whose gradients are those of a product with the dequantized weight."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        """Return the layer's product."""
        del bias  # the layer's own: it is an argument only so that autograd asks for its gradient
        return layer._product(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save what the gradients need, as the layer may change. torch.func requires it apart from `forward`."""
        del output
        _, bias, layer = inputs
        ctx.group, ctx.bias_dtype = layer.weight_group_shape, None if bias is None else bias.dtype
        ctx.save_for_backward(layer.weight, layer.weight_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients for x and for the bias; the layer has none."""
        weight, scale = ctx.saved_tensors
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ _dequantized(weight, scale, ctx.group, grad.dtype)
        if ctx.needs_input_grad[1]:
            rows = grad[None]  # an axis to sum over, also where grad is a vector
            of_bias = rows.sum(tuple(range(grad.dim())), dtype=torch.float32).to(ctx.bias_dtype)
        return of_x, of_bias, None

    vmap = staticmethod(_refuse_batches)


class BothModes(StraightThrough):
    """`StraightThrough` with forward-mode derivatives, too, which torch.compile does not support."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save what the derivatives of both modes need."""
        StraightThrough.setup_context(ctx, inputs, output)
        layer = inputs[2]
        ctx.save_for_forward(layer.weight, layer.weight_scale)
        ctx.dtype = output.dtype

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor | None, of_bias: Tensor | None, _: None) -> Tensor | None:
        """Return the tangent of the result, given the tangents of x and the bias (None is zero)."""
        weight, scale = ctx.saved_tensors
        made = of_bias
        if of_x is not None:
            wide = _dequantized(weight, scale, ctx.group, of_x.dtype)
            made = of_x @ wide.T if of_bias is None else of_x @ wide.T + of_bias
        return None if made is None else made.to(ctx.dtype)


class GroupedLayers(Protocol):
    """The part of grouped layers that the gradients use."""

    @property
    def weight_group_shape(self) -> GroupShape:
        """The groups of the weights' scales."""

    def _product(self, x: Any, offs: Tensor, out_dtype: Any) -> Tensor:
        """Return the layers' product, without gradients."""


class GroupedStraightThrough(torch.autograd.Function):
    """`StraightThrough` of grouped layers. Gradients wait for the ends of the groups."""

    @staticmethod
    def forward(x: Tensor, offs: Tensor, layers: GroupedLayers, out_dtype: Any) -> Tensor:
        """Return the layers' product."""
        return layers._product(x, offs, out_dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save what the gradient needs, as the layers may change."""
        del output
        _, offs, layers, _ = inputs
        ctx.group = layers.weight_group_shape
        ctx.save_for_backward(offs, layers.weight, layers.weight_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient for x: 0 for rows of no group."""
        run: Any = GROUPED_GRADIENT if is_compiling() else _grouped_gradient
        return run(grad, *ctx.saved_tensors, list(ctx.group)), None, None, None

    vmap = staticmethod(_refuse_batches)


def _grouped_gradient(grad: Tensor, offs: Tensor, weight: Tensor, scale: Tensor, groups: Sequence[int]) -> Tensor:
    """Return the gradient for the input of grouped layers, given that of the result and the groups of scales."""
    of_x = grad.new_zeros(len(grad), weight.shape[2])
    begin = 0
    for group, end in enumerate(min(end, len(grad)) for end in offs.tolist()):
        if end > begin:
            wide = _dequantized(weight[group], scale[group], GroupShape(*groups), grad.dtype)
            of_x[begin:end] = grad[begin:end] @ wide
            begin = end
    return of_x


def _define() -> Any:
    schema = "(Tensor grad, Tensor offs, Tensor weight, Tensor weight_scale, int[] group_shape) -> Tensor"
    LIBRARY.define("grouped_gradient" + schema, tags=TAGS)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl("grouped_gradient", _grouped_gradient, key)
    LIBRARY.impl("grouped_gradient", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(
        "fp8core::grouped_gradient",
        lambda grad, _, weight, *__: grad.new_empty((grad.shape[0], weight.shape[2])),
        lib=LIBRARY,
    )
    return torch.ops.fp8core.grouped_gradient.default


GROUPED_GRADIENT: Final = _define()
"""The operator that graphs have in place of a loop over the ends of groups, whose values no trace knows."""


def any_derivatives() -> bool:
    """Return whether derivatives of either mode may be wanted of anything."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def refuse_vmap() -> None:
    """Refuse a layer inside of torch.vmap in a graph with gradients: no tensor says there whether it requires grad.

    Exported programs pass no gradients through layers in any case.

    Raises:
        LayoutError: torch.compile traces inside of torch.vmap.
    """
    if _mapped() and not exporting():
        raise LayoutError(
            "x needs to be outside of torch.vmap, where the gradients of a layer would be lost, or inside of "
            "torch.no_grad()"
        )


def _mapped() -> bool:
    """Return whether torch traces inside of torch.vmap, as a constant."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key().name.lower() == "vmap" for level in levels)


# What torch.compiler.assume_constant_result sets:
_mapped._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_tangent(x: object) -> bool:
    """Return whether x has a tangent of forward-mode derivatives, which a product without `jvp` would lose."""
    if forward_ad._current_level < 0 or not isinstance(x, Tensor):
        return False
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def _dequantized(weight: Tensor, scale: Tensor, group: GroupShape, dtype: torch.dtype) -> Tensor:
    try:
        wide: Tensor = dequantize(weight, scale, group_shape=group, dtype=dtype)
    except LayoutError:
        if torch._C._functorch.maybe_current_level() is None:
            raise
        raise LayoutError(
            "x needs to be outside of torch.func's derivatives: layers of fp8core.torch have theirs by backward() and "
            "torch.autograd.forward_ad"
        ) from None
    return wide
