"""The engine of machines without a GPU: every operation on NumPy arrays, with the launches of the device rows.

A plan's launch takes addresses and strides like any other, and ignores the stream. NumPy and ml_dtypes are imported
when the first plan is made.
"""

from fp8core.problem import (
    AllClose,
    Dequantize,
    Expand,
    Normalize,
    NormQuantize,
    Quantize,
    Requantize,
    ScaledMm,
    SiluQuantize,
)
from fp8core.table import Launch


def plan_quantize(problem: Quantize) -> Launch:
    """Return the launch of ``data, scale = quantize(x)``."""
    from fp8core.host import quantize

    return quantize.plan_quantize(problem)


def plan_dequantize(problem: Dequantize) -> Launch:
    """Return the launch of ``out = q * scale``."""
    from fp8core.host import quantize

    return quantize.plan_dequantize(problem)


def plan_norm_quantize(problem: NormQuantize) -> Launch:
    """Return the launch of ``quantize(rms_norm(x [+ residual]) * weight)``."""
    from fp8core.host import fused

    return fused.plan_norm_quantize(problem)


def plan_silu_quantize(problem: SiluQuantize) -> Launch:
    """Return the launch of ``quantize(silu(gate) * up)``."""
    from fp8core.host import fused

    return fused.plan_silu_quantize(problem)


def plan_requantize(problem: Requantize) -> Launch:
    """Return the launch that re-expresses fused shards at their largest scale."""
    from fp8core.host import weights

    return weights.plan_requantize(problem)


def plan_normalize(problem: Normalize) -> Launch:
    """Return the launch that gives the same real values in the other E4M3."""
    from fp8core.host import weights

    return weights.plan_normalize(problem)


def plan_all_close(problem: AllClose) -> Launch:
    """Return the launch that tells whether all scales equal the first."""
    from fp8core.host import weights

    return weights.plan_all_close(problem)


def plan_expand(problem: Expand) -> Launch:
    """Return the launch that writes the scale of each shard once a row."""
    from fp8core.host import weights

    return weights.plan_expand(problem)


def plan_scaled_mm(problem: ScaledMm) -> Launch:
    """Return the launch of the scaled matrix product."""
    from fp8core.host import product

    return product.plan_scaled_mm(problem)


def plan_clear_amax() -> Launch:
    """Return ``launch(stream, amax)``, which writes the amax of a product without rows or columns."""
    from fp8core.host import product

    return product.clear_amax
