"""Plans of every kernel in every variant that it is compiled in, made without a device."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from fp8core.kernels.fused import NORM_QUANTIZE, SILU_QUANTIZE
from fp8core.kernels.gemm.blaslt.epilogue import plan_end
from fp8core.kernels.gemm.blaslt.moves import NOTHING, plan_moves
from fp8core.kernels.gemm.sm90.decode_unaligned import SM90_DECODE_UNALIGNED
from fp8core.kernels.gemm.sm90.tiled import SM90_TILED, tiled
from fp8core.kernels.gemm.sm90.tiled_cost import SPLIT_TILES, tiles
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.grouped.sm90 import SM90_GROUPED, candidates, plan_grouped
from fp8core.kernels.grouped.table import GROUPED_MM
from fp8core.kernels.linear.table import LINEAR
from fp8core.kernels.moe import MOE_PERMUTE, MOE_UNPERMUTE
from fp8core.kernels.quantize import QUANTIZE
from fp8core.kernels.weights import ALL_CLOSE, DEQUANTIZE, EXPAND, NORMALIZE, REQUANTIZE
from fp8core.problem import Quantize
from fp8core.runtime.plans import Plan as Prepared
from fp8core.table import Launch, Table
from fp8core.target import Target
from support.launches import whole
from support.problems import (
    all_close,
    dequantize,
    expand,
    grouped_mm,
    linear,
    moe_permute,
    moe_unpermute,
    norm_quantize,
    normalize,
    quantize,
    requantize,
    scaled_mm,
    silu_quantize,
    unaligned,
)

Plan = Callable[[], object]


def of_table(table: Table[Any], problems: Callable[[Target], Iterator[Any]]) -> Callable[[Target], Iterator[Plan]]:
    """Return a function that yields the plans of every able kernel of ``table``, preferred or not."""

    def plans(target: Target) -> Iterator[Plan]:
        for problem in problems(target):
            for kernel in table.kernels:
                if kernel.refusal(problem) is None:
                    yield partial(kernel.plan, problem)

    return plans


SIZES = (1, 32, 1000, 1 << 20)
"""Numbers of rows: for one block, for a cluster, for a resident grid, and for more than the device holds."""


def quantize_plans(target: Target) -> Iterator[Plan]:
    """Yield plans of `QUANTIZE` that are also launched, as some are only compiled when the rows are known.

    There are no gaps between rows of float16, which are read as those of bfloat16 are.
    """

    def launched(plan: Callable[[], Launch], problem: Quantize) -> None:
        launch = plan()
        launch = whole(launch) if isinstance(launch, Prepared) else launch
        for gap in (0,) if problem.x == "float16" else (0, 16):
            for rows in SIZES:
                stride = problem.cols + gap
                launch(0, 256, stride, 256, stride, 256, 0, 0, rows, rows, 0, float("inf"), 1e-10)

    for problem in quantize(target):
        for plan in of_table(QUANTIZE, lambda _, problem=problem: iter((problem,)))(target):
            yield partial(launched, plan, problem)


def by_rows(
    table: Table[Any], problems: Callable[[Target], Iterator[Any]], inputs: tuple[float, ...]
) -> Callable[[Target], Iterator[Plan]]:
    """Return plans of a fused producer that are also launched: its kernels are compiled when the rows are known."""

    def launched(plan: Callable[[], Launch], target: Target) -> None:
        launch, some = plan(), target.multiprocessors
        launch = whole(launch) if isinstance(launch, Prepared) else launch
        for rows in (1, some, 2 * some, 8 * some):
            launch(0, *inputs, 256, 256, 256, 0, 0, rows, 0, float("inf"), 1e-10)

    def plans(target: Target) -> Iterator[Plan]:
        for plan in of_table(table, problems)(target):
            yield partial(launched, plan, target)

    return plans


def arrange(target: Target) -> Iterator[Plan]:
    yield partial(plan_moves, target, (NOTHING, NOTHING))


def rescale(target: Target) -> Iterator[Plan]:
    """Yield plans of the epilogue after a library's product, which no table row plans without the library."""
    for problem in scaled_mm(target):
        if "group" not in (problem.scale_a, problem.scale_b):
            yield partial(plan_end, problem)


def by_tiles(target: Target) -> Iterator[Plan]:
    """Yield a plan for every tile of products of many rows, as a few problems would not choose all of them: with beta,
    which have the code of those without it and more, and with scales that change along k."""
    if target.arch != 90:
        return
    for problem in scaled_mm(target):
        wanted = problem.beta or (problem.scale_a == "group" and problem.alignment == 16)
        if wanted and problem.m == 300 and SM90_TILED.refusal(problem) is None:
            for tile in tiles(problem):
                yield partial(tiled, problem, tile)


def by_split_tiles(target: Target) -> Iterator[Plan]:
    """Yield a plan for every tile that several blocks share, each for another problem."""
    if target.arch != 90:
        return
    some = [p for p in scaled_mm(target) if p.m == 300 and not p.beta and SM90_TILED.refusal(p) is None]
    for number, tile in enumerate(SPLIT_TILES):
        able = [p for p in some if tile._replace(split_k=1) in tiles(p)]
        for problem in (able[number % len(able)], able[-1 - number % len(able)]):
            yield partial(tiled, problem, tile)


def by_grouped_tiles(target: Target) -> Iterator[Plan]:
    """Yield a plan for every tile of grouped products, for each pair of scales."""
    if target.arch != 90:
        return
    for problem in grouped_mm(target):
        if problem.groups == 8 and problem.m > 64 and SM90_GROUPED.refusal(problem) is None:
            for tile in candidates(problem):
                yield partial(plan_grouped, problem, tile)


def by_layouts(target: Target) -> Iterator[Plan]:
    """Yield plans of sm90_decode_unaligned alone, in layouts of each kind."""
    for problem in unaligned(target):
        assert SM90_DECODE_UNALIGNED.refusal(problem) is None
        yield partial(SM90_DECODE_UNALIGNED.plan, problem)


OPERATIONS: dict[str, Callable[[Target], Iterator[Plan]]] = {
    "quantize": quantize_plans,
    "norm_quantize": by_rows(NORM_QUANTIZE, norm_quantize, (*(256,) * 5, 1e-6)),
    "silu_quantize": by_rows(SILU_QUANTIZE, silu_quantize, (256, 256)),
    "dequantize": of_table(DEQUANTIZE, dequantize),
    "requantize": of_table(REQUANTIZE, requantize),
    "normalize": of_table(NORMALIZE, normalize),
    "all_close": of_table(ALL_CLOSE, all_close),
    "expand": of_table(EXPAND, expand),
    "scaled_mm": of_table(SCALED_MM, scaled_mm),
    "tiles": by_tiles,
    "split tiles": by_split_tiles,
    "layouts": by_layouts,
    "grouped_mm": of_table(GROUPED_MM, grouped_mm),
    "grouped tiles": by_grouped_tiles,
    "linear": of_table(LINEAR, linear),
    "moe_permute": of_table(MOE_PERMUTE, moe_permute),
    "moe_unpermute": of_table(MOE_UNPERMUTE, moe_unpermute),
    "arrange_scales": arrange,
    "rescale": rescale,
}
"""By operation: the function that yields all plans to try on a target."""
