"""The grouped product on the host: the product of each group, one after the other."""

from fp8core.dtypes import ITEMSIZE
from fp8core.host.memory import vector
from fp8core.host.product import plan_scaled_mm
from fp8core.problem import GroupedMm
from fp8core.table import Launch


def plan_grouped_mm(problem: GroupedMm) -> Launch:
    """Return the launch of ``out[rows of i] = round(scale_a * (scale_b[i] * (a[rows of i] @ b[i])) + bias[i])``."""
    p = problem.product
    out_bytes, bias_bytes = p.ldo * ITEMSIZE[p.out], problem.bias_stride * ITEMSIZE[p.bias or "float32"]

    def launch(_stream: int, a: int, b: int, scale_a: int, scale_b: int, bias: int, offs: int, out: int) -> None:
        """Multiply the rows of ``a [m, k]`` up to each end in ``offs`` with the stored ``b[i] [n, k]``."""
        start = 0
        for group, given in enumerate(vector(offs, "int32", problem.groups).tolist()):
            end = max(start, min(given, p.m))
            if end > start:
                plan_scaled_mm(p._replace(m=end - start))(
                    0,
                    a + start * p.lda,
                    b + group * problem.weight_stride,
                    scale_a + 4 * start * p.scale_a_strides[0],
                    scale_b + 4 * group * problem.scale_stride,
                    bias + group * bias_bytes,
                    out + start * out_bytes,
                    0,
                    0,
                    0,
                )
            start = end

    return launch
