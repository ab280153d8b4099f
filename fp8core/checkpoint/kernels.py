"""The kernels of linear layers, planned for a device that need not be in this machine."""

from collections.abc import Iterable

from fp8core.checkpoint.linear_shapes import LayerShape
from fp8core.core.ahead import plan_ahead
from fp8core.kernels.gemm import corrections
from fp8core.ops.linear import linear
from fp8core.problem import ABSENT, Target
from fp8core.runtime import device, jit
from fp8core.tuning.files import named_ahead
from fp8core.tuning.shapes import layer_call
from fp8core.tuning.values import apply_ahead


def kernels_of(layers: Iterable[tuple[int, LayerShape]], dtype: str, target: Target) -> list[jit.Asked]:
    """Return the kernels of layers, each with a number of rows, in this process for ``target`` so far.

    Args:
        layers: numbers of rows and layers.
        dtype: that of inputs and results.
        target: the device. One that is not in this machine and has no model stands for each model that was measured or
            tuned, and for others. Products that a library would run there get fp8core's own kernel.

    Warns:
        RuntimeWarning: the file in ``$FP8CORE_TUNINGS`` cannot be read.
    """
    wanted = list(layers)
    for place in _places(target):
        for m, layer in wanted:
            call = layer_call((m, layer.n, layer.k), layer.scheme, dtype, bias=layer.bias, device=place)
            plan_ahead(linear, place, *call.arguments, **call.keywords)
    absent = target._replace(device=ABSENT, model="")
    return [kernel for kernel in jit.ASKED if kernel.target == absent]


def _places(target: Target) -> list[Target]:
    """Return the target without its device, with each model that it may be; make their products run what was tuned."""
    model = target.model if target.device == ABSENT else device.name(target.device)
    absent = target._replace(device=ABSENT, model=model)
    tunings = named_ahead(absent)
    for tuning in tunings:
        apply_ahead(tuning, absent._replace(model=tuning.machine.gpu))
    if model:
        return [absent]
    models = "", *corrections.measured_models(target), *(tuning.machine.gpu for tuning in tunings)
    return [absent._replace(model=each) for each in dict.fromkeys(models)]
