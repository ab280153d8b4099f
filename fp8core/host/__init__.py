"""The host engine: runs every operation with NumPy, for arrays in host memory, through launches like those of kernels.

The launches take addresses, like all launches, and ignore the stream. NumPy and ml_dtypes are imported when the
first plan is made.
"""

from fp8core.problem import (
    AllClose,
    Dequantize,
    Expand,
    GroupedMm,
    MoePermute,
    MoeUnpermute,
    Normalize,
    NormQuantize,
    Quantize,
    Requantize,
    ScaledMm,
    SiluQuantize,
)
from fp8core.runtime.plans import (
    AllCloseNumbers,
    DequantizeNumbers,
    ExpandNumbers,
    MoePermuteNumbers,
    MoeUnpermuteNumbers,
    NormalizeNumbers,
    Plan,
    QuantizeNumbers,
    RequantizeNumbers,
    RmsNormNumbers,
    SiluNumbers,
)
from fp8core.table import Launch


def plan_quantize(problem: Quantize) -> Plan[QuantizeNumbers]:
    """Return the plan of ``data, scale = quantize(x)``."""
    from fp8core.host import quantize

    return quantize.plan_quantize(problem)


def plan_dequantize(problem: Dequantize) -> Plan[DequantizeNumbers]:
    """Return the plan of ``out = q * scale``."""
    from fp8core.host import quantize

    return quantize.plan_dequantize(problem)


def plan_norm_quantize(problem: NormQuantize) -> Plan[RmsNormNumbers]:
    """Return the plan of ``quantize(rms_norm(x [+ residual]) * weight)``."""
    from fp8core.host import fused

    return fused.plan_norm_quantize(problem)


def plan_silu_quantize(problem: SiluQuantize) -> Plan[SiluNumbers]:
    """Return the plan of ``quantize(silu(gate) * up)``."""
    from fp8core.host import fused

    return fused.plan_silu_quantize(problem)


def plan_requantize(problem: Requantize) -> Plan[RequantizeNumbers]:
    """Return the plan that requantizes fused shards to their largest scale."""
    from fp8core.host import weights

    return weights.plan_requantize(problem)


def plan_normalize(problem: Normalize) -> Plan[NormalizeNumbers]:
    """Return the plan that converts a weight to the other E4M3 with the same real values."""
    from fp8core.host import weights

    return weights.plan_normalize(problem)


def plan_all_close(problem: AllClose) -> Plan[AllCloseNumbers]:
    """Return the plan that tests whether all scales equal the first."""
    from fp8core.host import weights

    return weights.plan_all_close(problem)


def plan_expand(problem: Expand) -> Plan[ExpandNumbers]:
    """Return the plan that writes the scale of each shard once per row."""
    from fp8core.host import weights

    return weights.plan_expand(problem)


def plan_scaled_mm(problem: ScaledMm) -> Launch:
    """Return the launch of the scaled matrix product."""
    from fp8core.host import product

    return product.plan_scaled_mm(problem)


def plan_grouped_mm(problem: GroupedMm) -> Launch:
    """Return the launch of the grouped product."""
    from fp8core.host import grouped

    return grouped.plan_grouped_mm(problem)


def plan_moe_permute(problem: MoePermute) -> Plan[MoePermuteNumbers]:
    """Return the plan that brings rows into the order of their experts."""
    from fp8core.host import moe

    return moe.plan_moe_permute(problem)


def plan_moe_unpermute(problem: MoeUnpermute) -> Plan[MoeUnpermuteNumbers]:
    """Return the plan that sums the rows of each token."""
    from fp8core.host import moe

    return moe.plan_moe_unpermute(problem)


def plan_clear_amax() -> Launch:
    """Return ``launch(stream, amax)``, which writes the amax of a product without rows or columns."""
    from fp8core.host import product

    return product.clear_amax
