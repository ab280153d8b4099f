"""The kernels of linear layers, planned for a device that need not be in this machine."""

from collections.abc import Iterable

from fp8core.checkpoint.linear_shapes import LayerShape
from fp8core.core.ahead import plan_ahead
from fp8core.kernels.gemm import corrections
from fp8core.ops.linear import linear
from fp8core.problem import ABSENT, Target
from fp8core.runtime import device, jit
from fp8core.tuning.shapes import layer_call


def kernels_of(layers: Iterable[tuple[int, LayerShape]], dtype: str, target: Target) -> list[jit.Asked]:
    """Return the kernels of layers, each with a number of rows, in this process for ``target`` so far.

    Args:
        layers: numbers of rows and layers.
        dtype: that of inputs and results.
        target: the device. One that is not in this machine and has no model stands for each measured model and for
            others (`models_of`). Products that a library would run there get fp8core's own kernel.
    """
    wanted = list(layers)
    for place in models_of(target):
        for m, layer in wanted:
            call = layer_call((m, layer.n, layer.k), layer.scheme, dtype, bias=layer.bias, device=place)
            plan_ahead(linear, place, *call.arguments, **call.keywords)
    absent = target._replace(device=ABSENT, model="")
    return [kernel for kernel in jit.ASKED if kernel.target == absent]


def models_of(target: Target) -> list[Target]:
    """Return a target, as one that is not in this machine, with each model of GPU that it may be."""
    if target.device != ABSENT:
        models = [device.name(target.device)]
    elif target.model:
        models = [target.model]
    else:
        models = ["", *corrections.measured_models(target)]
    return [target._replace(device=ABSENT, model=model) for model in models]
