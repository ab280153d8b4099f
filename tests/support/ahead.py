"""What tests of plans for devices that are not in this machine share."""

from fp8core.core import operation
from fp8core.kernels.fused.silu import SILU_QUANTIZE
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.grouped.table import GROUPED_MM
from fp8core.kernels.linear.table import LINEAR
from fp8core.kernels.moe import MOE_PERMUTE, MOE_UNPERMUTE
from fp8core.kernels.quantize import QUANTIZE
from fp8core.runtime import jit
from fp8core.target import ABSENT


def absent(target):
    return target._replace(device=ABSENT)


def forget():
    """Drop plans, and the kernels that they have asked for."""
    operation.forget()
    for table in (SCALED_MM, GROUPED_MM, LINEAR, MOE_PERMUTE, MOE_UNPERMUTE, QUANTIZE, SILU_QUANTIZE):
        table.forget()
    jit.ASKED.clear()
