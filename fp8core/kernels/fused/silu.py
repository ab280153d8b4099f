"""SiLU of the gate times up, and quantization, in one launch."""

from typing import Final, NamedTuple

from fp8core import host
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.fused.configs import ProducerConfig
from fp8core.kernels.fused.prepare import COUNTABLE, GROUPS_OF_VECTORS, Source, plan_producer
from fp8core.kernels.requirements import ON_A_GPU, ON_THE_HOST
from fp8core.problem import SiluQuantize
from fp8core.runtime import launches, limits
from fp8core.runtime.args import Float32, Int32, Int64, Pointer
from fp8core.runtime.plans import Plan, SiluNumbers
from fp8core.table import Kernel, Table


class SiluArgs(NamedTuple):
    """The arguments of cuda_src/fused/silu.cuh; strides are in elements."""

    x: Pointer
    x_stride: Int64
    data: Pointer
    data_stride: Int64
    scale: Pointer
    scale_row_stride: Int64
    scale_col_stride: Int64
    upper: Pointer
    upper_value: Float32
    eps: Float32
    rows: Int64
    cols: Int32


def plan_silu_quantize(problem: SiluQuantize) -> Plan[SiluNumbers]:
    """Return the plan of `SILU_QUANTIZE`."""

    def grid(rows: int, blocks: int) -> launches.Dim3:
        return blocks, min(rows, limits.BLOCKS_ALONG_YZ), ceil_div(rows, limits.BLOCKS_ALONG_YZ)

    def constants(config: ProducerConfig) -> dict[str, int]:
        return {"FP8_FEW": int(config.few)}

    return plan_producer(problem, Source("fused/silu", "silu_and_mul_quant", SiluArgs), SiluNumbers, grid, constants)


SILU_QUANTIZE: Final = Table(
    "silu_and_mul_quant",
    SiluQuantize,
    Kernel("silu_and_mul_quant", (ON_A_GPU, GROUPS_OF_VECTORS, COUNTABLE), plan_silu_quantize),
    Kernel("host", (ON_THE_HOST, GROUPS_OF_VECTORS), host.plan_silu_quantize),
)
"""``y = silu(gate) * up`` in fp32 with ``silu(v) = v / (1 + exp(-v))`` within 6 ulp, or, below 2**-110, within ``|v| *
2**-118``; -Inf gives NaN, as in the formula. ``round_intermediate`` rounds ``silu(gate)`` and ``y`` to x's dtype. For
float16, ``silu(gate)`` is then computed in fp32 steps, with a rounded sum and a rounded quotient, and with the device's
``expf`` (within 2 ulp: 7 of the 63,488 gates depend on its last bit). Then ``y`` is quantized exactly as by
`QUANTIZE`."""
