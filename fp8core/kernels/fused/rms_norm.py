"""RMS norm, with or without a residual, and quantization in one launch."""

from typing import Final, NamedTuple

from fp8core import host
from fp8core.kernels.encodings import TYPE
from fp8core.kernels.fused.configs import ProducerConfig, predicts_amax
from fp8core.kernels.fused.prepare import COUNTABLE, GROUPS_OF_VECTORS, Source, plan_producer
from fp8core.kernels.requirements import ON_A_GPU, ON_THE_HOST
from fp8core.problem import NormQuantize
from fp8core.runtime.args import Float32, Int32, Int64, Pointer
from fp8core.runtime.plans import Plan, RmsNormNumbers
from fp8core.table import Kernel, Table


class RmsNormArgs(NamedTuple):
    """The arguments of cuda_src/fused/rms_norm.cuh; strides are in elements."""

    x: Pointer
    x_stride: Int64
    weight: Pointer
    residual: Pointer
    residual_stride: Int64
    epsilon: Float32
    data: Pointer
    data_stride: Int64
    scale: Pointer
    scale_row_stride: Int64
    scale_col_stride: Int64
    upper: Pointer
    upper_value: Float32
    eps: Float32
    cols: Int32
    inverse_cols: Float32


def plan_norm_quantize(problem: NormQuantize) -> Plan[RmsNormNumbers]:
    """Return the plan of `NORM_QUANTIZE`."""
    kernel = Source("fused/rms_norm", "rms_norm_quant", RmsNormArgs)

    def constants(config: ProducerConfig) -> dict[str, int]:
        return {
            "FP8_W": TYPE[problem.weight],
            "FP8_RESIDUAL": int(problem.residual),
            "FP8_FEW": int(config.few),
            "FP8_PREDICTS_AMAX": int(predicts_amax(problem, config)),
        }

    return plan_producer(problem, kernel, RmsNormNumbers, lambda rows, blocks: (rows * blocks, 1, 1), constants)


NORM_QUANTIZE: Final = Table(
    "rms_norm_quant",
    NormQuantize,
    Kernel("rms_norm_quant", (ON_A_GPU, GROUPS_OF_VECTORS, COUNTABLE), plan_norm_quantize),
    Kernel("host", (ON_THE_HOST, GROUPS_OF_VECTORS), host.plan_norm_quantize),
)
"""``h = x``, or with a residual ``x + residual`` in fp32, which is stored in residual, rounded to its dtype.
``y = (h * r) * weight`` in fp32 with ``r = 1 / sqrt(sum(h * h) / cols + epsilon)``. ``round_intermediate`` rounds
``h * r`` and ``y`` to x's dtype, and with a given scale also ``h``, as in vLLM's static kernels. (Its dynamic kernels,
and those of FlashInfer, norm the fp32 sum.) Then ``y`` is quantized exactly as by `QUANTIZE`."""
