"""Quantization fused with the operation before it in a transformer: RMS norm, or SiLU and multiply."""

from functools import partial

import numpy as np

from fp8core.host.codes import ONE, reciprocal
from fp8core.host.memory import CHUNK, Array, Floats, Workspace, matrix, storage, vector
from fp8core.host.quantize import Limits, quantize_rows, scale_dtype
from fp8core.problem import NormQuantize, SiluQuantize
from fp8core.runtime.plans import Plan, RmsNormNumbers, SiluNumbers


def rows_at_once(problem: NormQuantize | SiluQuantize) -> int:
    """Return the number of rows that are produced and then quantized together: whole groups, about `CHUNK` elements."""
    step = max(problem.group_shape.rows, 1)
    return step * max(CHUNK // max(step * problem.cols, 1), 1)


def rounded(values: Floats, dtype: str, enabled: bool) -> Floats:
    """Return ``values`` rounded to ``dtype`` and back to fp32 if ``enabled``, otherwise unchanged."""
    return values.astype(storage(dtype)).astype(np.float32) if enabled else values


def scales_at(scales: Array, group_rows: int, start: int, stop: int) -> Array:
    """Return the scales of the rows from ``start``, which begins a group, to ``stop``."""
    return scales if group_rows < 0 else scales[start // group_rows : -(-stop // group_rows)]


def plan_norm_quantize(problem: NormQuantize) -> Plan[RmsNormNumbers]:
    """Return the plan of ``quantize(rms_norm(x [+ residual]) * weight)``, computed in fp32.

    The fp32 sum is normalized, and stored in residual rounded to the dtype of x. ``round_intermediate`` also rounds the
    normalized rows and their product with the weight to that dtype, and the sum if the scale is given.
    """
    cols, height, kept = problem.cols, rows_at_once(problem), scale_dtype(problem.scale_format)
    between = problem.round_intermediate

    @np.errstate(all="ignore")
    def launch(
        n: RmsNormNumbers, _stream: int, x: int, weight: int, residual: int, data: int, scale: int, upper: int
    ) -> None:
        """Normalize and quantize ``[rows, cols]``; ``residual`` becomes x + residual."""
        rows = n.rows
        source = matrix(x, problem.x, (rows, cols), (n.x_stride, 1))
        codes = matrix(data, problem.data, (rows, cols), (n.data_stride, 1))
        grid = problem.group_shape.scale_shape(rows, cols)
        scales = matrix(scale, kept, grid, (n.scale_row_stride, n.scale_col_stride))
        gain = vector(weight, problem.weight, cols).astype(np.float32)
        sums = matrix(residual, problem.x, (rows, cols), (n.residual_stride, 1)) if problem.residual else source
        work, limits = Workspace.of(height * cols), Limits.given(upper, n.upper_value, n.eps)
        for start in range(0, rows, height):
            here = slice(start, min(start + height, rows))
            wide = source[here].astype(np.float32)
            if problem.residual:
                wide += sums[here].astype(np.float32)
                sums[here] = wide
                wide = rounded(wide, problem.x, between and problem.static)
            mean = np.square(wide).sum(axis=1, keepdims=True, dtype=np.float32) / np.float32(max(cols, 1))
            wide *= reciprocal(np.sqrt(mean + np.float32(n.epsilon)))
            values = rounded(rounded(wide, problem.x, between) * gain, problem.x, between)
            part = scales_at(scales, problem.group_shape.rows, here.start, here.stop)
            quantize_rows(values, problem, codes[here], part, limits, work)

    return Plan(RmsNormNumbers, lambda numbers: partial(launch, numbers))


def plan_silu_quantize(problem: SiluQuantize) -> Plan[SiluNumbers]:
    """Return the plan of ``quantize(silu(gate) * up)``, computed in fp32.

    ``round_intermediate`` rounds the activation and the product to the dtype of x.
    """
    cols, height, kept = problem.cols, rows_at_once(problem), scale_dtype(problem.scale_format)
    between = problem.round_intermediate

    @np.errstate(all="ignore")
    def launch(n: SiluNumbers, _stream: int, x: int, data: int, scale: int, upper: int) -> None:
        """Activate and quantize ``[rows, 2 * cols]``, gate before up."""
        rows = n.rows
        source = matrix(x, problem.x, (rows, 2 * cols), (n.x_stride, 1))
        codes = matrix(data, problem.data, (rows, cols), (n.data_stride, 1))
        grid = problem.group_shape.scale_shape(rows, cols)
        scales = matrix(scale, kept, grid, (n.scale_row_stride, n.scale_col_stride))
        work, limits = Workspace.of(height * cols), Limits.given(upper, n.upper_value, n.eps)
        for start in range(0, rows, height):
            here = slice(start, min(start + height, rows))
            gate: Floats = source[here, :cols].astype(np.float32)
            up: Floats = source[here, cols:].astype(np.float32)
            activated: Floats = np.divide(gate, np.exp(-gate) + ONE)
            values = rounded(rounded(activated, problem.x, between) * up, problem.x, between)
            part = scales_at(scales, problem.group_shape.rows, here.start, here.stop)
            quantize_rows(values, problem, codes[here], part, limits, work)

    return Plan(SiluNumbers, lambda numbers: partial(launch, numbers))
