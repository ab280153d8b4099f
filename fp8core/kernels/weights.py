"""Kernels over weights and their scales: requantization at the largest scale, the other E4M3, equality of scales.

What is exact and what the corners give stands at `REQUANTIZE`, `NORMALIZE` and `ALL_CLOSE`.
"""

from itertools import accumulate
from typing import Final

from fp8core import host
from fp8core.kernels.encodings import FORMAT, ceil_div, threads_across
from fp8core.kernels.requirements import platform
from fp8core.problem import AllClose, Normalize, Requantize
from fp8core.runtime import jit
from fp8core.table import Kernel, Launch, Requirement, Table

THREADS: Final = 256
IN_FLIGHT: Final = 2
"""Rows of a thread in requantize (REQUANTIZE_ROWS), vectors in normalize (NORMALIZE_VECTORS)."""
CAPACITIES: Final = (8, 64, 512)
"""How many shards a compiled kernel takes: their ends travel by value in its arguments."""
ALL_CLOSE_THREADS: Final = 1024
NO_END: Final = 2**31 - 1


def plan_requantize(problem: Requantize) -> Launch:
    """Return ``launch(stream, weight, weight_stride, scales, scales_count, widths, out, out_stride, max_scale)``.

    ``widths`` are the rows of each shard, as many as the problem's ``shards``. The launch writes ``max_scale``, and
    ``out`` where it is another array than ``weight`` or where codes change.
    """
    vector = 16 if problem.alignment >= 16 else 1
    capacity = next(c for c in CAPACITIES if problem.shards <= c)
    across = threads_across(ceil_div(problem.cols, vector), THREADS)
    cols, column_tiles = problem.cols, max(1, ceil_div(problem.cols, across * vector))
    rows_a_block = THREADS // across * IN_FLIGHT
    launcher = jit.prepare(
        problem.target,
        "requantize",
        "requantize",
        {
            "FP8_FORMAT": FORMAT[problem.dtype],
            "FP8_SHARDS": capacity,
            "FP8_VECTOR": vector,
            "FP8_ACROSS": across,
            "FP8_THREADS": THREADS,
        },
        f"PqPi{capacity}iPqPiii",
        block=THREADS,
        programmatic=True,
    )

    def launch(
        stream: int,
        weight: int,
        weight_stride: int,
        scales: int,
        scales_count: int,
        widths: tuple[int, ...],
        out: int,
        out_stride: int,
        max_scale: int,
    ) -> None:
        ends = tuple(accumulate(widths))
        rows = ends[-1] if ends else 0
        ends += (NO_END,) * (capacity - len(ends))
        grid = (column_tiles * max(1, ceil_div(rows, rows_a_block)), 1, 1)
        inputs, results = (weight, weight_stride, scales, scales_count, *ends), (out, out_stride, max_scale)
        launcher(stream, grid, *inputs, *results, rows, cols, column_tiles)

    return launch


def plan_normalize(problem: Normalize) -> Launch:
    """Return the launch of `NORMALIZE`.

    ``launch(stream, weight, out, count, scale, scale_out, scale_count, input_scale, input_scale_out,
    input_scale_count)``: ``weight`` is contiguous; counts of scales may be 0, their addresses then too.
    """
    vector = 16 if problem.alignment >= 16 else 1
    codes_a_block = THREADS * IN_FLIGHT * vector
    launcher = jit.prepare(
        problem.target,
        "normalize",
        "normalize",
        {"FP8_TO_FNUZ": int(problem.dtype == "float8_e4m3fn"), "FP8_VECTOR": vector, "FP8_THREADS": THREADS},
        "PPqPPqPPq",
        block=THREADS,
        programmatic=True,
    )

    def launch(
        stream: int,
        weight: int,
        out: int,
        count: int,
        scale: int,
        scale_out: int,
        scale_count: int,
        input_scale: int,
        input_scale_out: int,
        input_scale_count: int,
    ) -> None:
        scales = (scale, scale_out, scale_count, input_scale, input_scale_out, input_scale_count)
        launcher(stream, (max(1, ceil_div(count, codes_a_block)), 1, 1), weight, out, count, *scales)

    return launch


def plan_all_close(problem: AllClose) -> Launch:
    """Return ``launch(stream, x, count, result)``: ``result`` is one int32, 1 when all are close to the first."""
    constants = {"FP8_THREADS": ALL_CLOSE_THREADS}
    launcher = jit.prepare(problem.target, "all_close", "all_close", constants, "PqP", block=ALL_CLOSE_THREADS)

    def launch(stream: int, x: int, count: int, result: int) -> None:
        launcher(stream, (1, 1, 1), x, count, result)

    return launch


def shards_up_to(most: int) -> Requirement:
    """Require at most ``most`` shards."""
    return Requirement(lambda p: p.shards <= most, f"needs at most {most} shards, got {{p.shards}}")


_E4M3: Final = Requirement(
    lambda p: p.dtype.startswith("float8_e4m3"), "needs float8_e4m3fn or float8_e4m3fnuz, got {p.dtype}"
)

REQUANTIZE: Final = Table(
    "requantize",
    Requantize,
    Kernel("shards", (platform("cuda", "hip"), shards_up_to(CAPACITIES[-1])), plan_requantize),
    Kernel("host", (platform("host"),), host.plan_requantize),
)
"""``code = encode(RN(RN(float(code) * scale of its shard) * RN(1 / max_scale)))``, clamped, in one launch.

``max_scale`` is the largest scale, zero-width shards' included, NaN if one is NaN. The codes stay as they are

- in shards whose scale is ``max_scale``;
- everywhere with one scale, and where a scale after the first is the mark "unset" (the lowest float, or anything
  ≤ -448: the checkpoint was fused on disk): ``max_scale`` is then the first scale;
- everywhere when ``max_scale`` is 0 (or below 2**-126), infinite or NaN: no code could say it better.

Formula: static quantization (vLLM's ``requantize_with_max_scale``) of the shard dequantized in fp32, not fp16.
"""

NORMALIZE: Final = Table(
    "normalize",
    Normalize,
    Kernel("codes", (platform("cuda", "hip"), _E4M3), plan_normalize),
    Kernel("host", (platform("host"), _E4M3), host.plan_normalize),
)
"""fn to fnuz: 0x80 becomes 0x00, 0x7f and 0xff become 0x80, scales double. fnuz to fn: 0x80 becomes 0x7f, 0x7f and
0xff (±240) become 0x7e and 0xfe (±448), scales halve. All other codes stay. One launch for codes and scales, in place
or not."""

ALL_CLOSE: Final = Table(
    "all_close",
    AllClose,
    Kernel("block", (platform("cuda", "hip"),), plan_all_close),
    Kernel("host", (platform("host"),), host.plan_all_close),
)
"""Whether every number equals the first or ``|x_i - x_0|`` is finite and at most ``1e-5 * |x_0|``.

None are close, a NaN is not."""
