"""The kernels of linear layers, planned for a device that need not be in this machine."""

from collections.abc import Iterable

from fp8core.checkpoint.linear_shapes import LayerShape
from fp8core.core.ahead import plan_ahead
from fp8core.ops.linear import linear
from fp8core.problem import ABSENT, Target
from fp8core.runtime import jit
from fp8core.tuning.shapes import layer_call


def kernels_of(layers: Iterable[tuple[int, LayerShape]], dtype: str, target: Target) -> list[jit.Asked]:
    """Return the kernels of layers, each with a number of rows, in this process for ``target`` so far.

    Args:
        layers: numbers of rows and layers.
        dtype: that of inputs and results.
        target: the device. Products that a library would run there get fp8core's own kernel.
    """
    absent = target._replace(device=ABSENT)
    for m, layer in layers:
        call = layer_call((m, layer.n, layer.k), layer.scheme, dtype, bias=layer.bias, device=absent)
        plan_ahead(linear, call.target, *call.arguments, **call.keywords)
    return [kernel for kernel in jit.ASKED if kernel.target == absent]
