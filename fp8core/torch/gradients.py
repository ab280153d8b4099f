"""The gradients of a layer: those that its dequantized weight would give."""

from typing import Any, Protocol

import torch
from torch import Tensor

from fp8core.ops import dequantize
from fp8core.problem import GroupShape


class Layer(Protocol):
    """What the gradients need of a layer."""

    @property
    def weight_group_shape(self) -> GroupShape:
        """The groups of the weight's scales."""

    def _product(self, x: Any) -> Tensor:
        """Return the layer's product, without gradients."""


class StraightThrough(torch.autograd.Function):
    """The product of a layer, with the gradient that the dequantized weight would give."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        """Return the layer's product."""
        del bias  # it is the layer's, and here for its gradient
        return layer._product(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients need, as the layer may change; on its own, so that torch.func can differentiate."""
        del output
        _, bias, layer = inputs
        ctx.group, ctx.bias_dtype = layer.weight_group_shape, None if bias is None else bias.dtype
        ctx.save_for_backward(layer.weight, layer.weight_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of x and the bias."""
        weight, scale = ctx.saved_tensors
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ dequantize(weight, scale, group_shape=ctx.group, dtype=grad.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return of_x, of_bias, None


class BothModes(StraightThrough):
    """The same with derivatives in forward mode, too, which torch.compile does not take."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients of both modes need."""
        StraightThrough.setup_context(ctx, inputs, output)
        layer = inputs[2]
        ctx.save_for_forward(layer.weight, layer.weight_scale)
        ctx.dtype = output.dtype

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor | None, of_bias: Tensor | None, _: None) -> Tensor | None:
        """Return the derivative in the direction of those of x and the bias, in forward mode."""
        weight, scale = ctx.saved_tensors
        made = of_bias
        if of_x is not None:
            wide: Tensor = dequantize(weight, scale, group_shape=ctx.group, dtype=of_x.dtype)
            made = of_x @ wide.T if of_bias is None else of_x @ wide.T + of_bias
        return None if made is None else made.to(ctx.dtype)
