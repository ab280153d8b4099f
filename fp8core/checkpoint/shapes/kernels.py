"""The kernels of linear layers and of experts, planned for a device that need not be in this machine."""

from collections.abc import Iterable
from typing import Any

from fp8core.checkpoint.shapes.linear import LayerShape
from fp8core.checkpoint.shapes.mixtures import MixtureShape
from fp8core.core.ahead import plan_ahead
from fp8core.core.explaining import ArraySpec
from fp8core.kernels.gemm import corrections
from fp8core.ops import grouped_scaled_mm_nt, moe_permute, moe_unpermute, quantize, silu_and_mul_quant
from fp8core.ops.grouped_mm import layout_of_scales
from fp8core.ops.linear import linear
from fp8core.ops.linear_scratch import aligned_strides
from fp8core.ops.moe_permute import IDS
from fp8core.ops.quantized import Quantized
from fp8core.runtime import device, jit
from fp8core.target import ABSENT, Target
from fp8core.tuning.files import named_ahead
from fp8core.tuning.shapes import SCHEMES, layer_call
from fp8core.tuning.values import apply_ahead


def kernels_of(
    layers: Iterable[tuple[int, LayerShape]],
    dtype: str,
    target: Target,
    mixtures: Iterable[tuple[int, MixtureShape]] = (),
) -> list[jit.Asked]:
    """Return the kernels of layers, each with a number of rows, in this process for ``target`` so far.

    Args:
        layers: numbers of rows and layers.
        dtype: that of inputs and results.
        target: the device. One that is not in this machine and has no model stands for each model that was measured or
            tuned, and for others. Products that a library would run there get fp8core's own kernel.
        mixtures: numbers of tokens and mixtures of experts.

    Warns:
        RuntimeWarning: the file in ``$FP8CORE_TUNINGS`` cannot be read.
    """
    wanted, mixed = list(layers), list(mixtures)
    for place in _places(target):
        for m, layer in wanted:
            call = layer_call((m, layer.n, layer.k), layer.scheme, dtype, **layer.options, device=place)
            plan_ahead(linear, place, *call.arguments, **call.keywords)
        for tokens, mixture in mixed:
            _plan_experts(tokens, mixture, dtype, place)
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


def _plan_experts(tokens: int, mixture: MixtureShape, dtype: str, place: Target) -> None:
    """Plan the calls of `fp8core.transformers.GroupedExperts`.

    Activations other than SiLU are operations of torch, after which the input of down is quantized.
    """
    experts, each, hidden, inner, scheme, gated, static, weight_dtype = mixture
    of_x, of_weight = SCHEMES[scheme]
    choices = tokens * each
    given = ArraySpec((choices, 1), "float32")  # a static scale for each row: that of its expert

    def quantized(made: list[ArraySpec]) -> Quantized[ArraySpec, ArraySpec]:
        data, *scales = made
        return Quantized(data, scales[0] if scales else given, of_x)

    def form(rows: int) -> dict[str, object]:
        if static:
            return {"group_shape": of_x, "scale": given}
        return {"group_shape": of_x, "scale_layout": layout_of_scales(of_x, rows)}

    def product(a: Quantized[ArraySpec, ArraySpec], n: int, k: int, offs: ArraySpec) -> ArraySpec:
        scale = ArraySpec((experts, *of_weight.scale_shape(n, k)), "float32")
        shape = experts, n, k
        codes = ArraySpec(shape, weight_dtype, strides=aligned_strides(shape))
        weight = Quantized(codes, scale, of_weight)
        return plan_ahead(grouped_scaled_mm_nt, place, a, weight, offs=offs, out_dtype=dtype)[0]

    x: Any = ArraySpec((tokens, hidden), dtype)
    if not static:
        x = quantized(plan_ahead(quantize, place, x, **form(tokens)))
    for of_choices in IDS:
        *rows, offs, inverse = plan_ahead(moe_permute, place, x, ArraySpec((tokens, each), of_choices), experts)
    if static:
        rows = plan_ahead(quantize, place, *rows, **form(choices))
    both = product(quantized(rows), (1 + gated) * inner, hidden, offs)
    made = plan_ahead(quantize, place, ArraySpec((choices, inner), dtype), **form(choices))
    if gated:
        made = plan_ahead(silu_and_mul_quant, place, both, round_intermediate=True, **form(choices))
    y = product(quantized(made), hidden, inner, offs)
    for of_weights in dict.fromkeys((dtype, "float32")):
        plan_ahead(moe_unpermute, place, y, inverse, ArraySpec((tokens, each), of_weights), out_dtype=dtype)
