"""Tokens, groups and blocks that fit into registers, and given scales: every element is read once and written once."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.quantize.configs import VEC8, Tile, few, row_bounds, rowwise_config, tile_of
from fp8core.kernels.quantize.prepare import Chosen, folded, plan_of, prepare
from fp8core.problem import Quantize
from fp8core.runtime.plans import Plan, QuantizeNumbers


def by_rows(problem: Quantize, configured: Callable[[Quantize, int], Callable[[int], Chosen]]) -> Plan[QuantizeNumbers]:
    """Return a plan with different kernels for different numbers of rows, each compiled when it is first needed."""
    bounds = row_bounds(problem)

    @cache
    def up_to(most_rows: int) -> Callable[[int], Chosen]:
        return configured(problem, most_rows)

    def choose(numbers: QuantizeNumbers) -> Chosen:
        rows = numbers.rows_padded
        return up_to(bounds[bisect_left(bounds, rows)])(rows)

    return plan_of(problem.cols, choose)


def plan_rowwise(problem: Quantize) -> Plan[QuantizeNumbers]:
    """Return the plan of cuda_src/quantize/rowwise.cuh, for rows aligned to 8 or 16 bytes."""
    return by_rows(problem, _configured)


def _configured(problem: Quantize, most_rows: int) -> Callable[[int], Chosen]:
    """Return a function of a number of rows, up to ``most_rows``, that gives the kernel and the grid."""
    cols, tile = problem.cols, tile_of(problem, most_rows)
    config = rowwise_config(problem, tile, most_rows)
    if tile.rows == 1 and problem.group_shape.cols < 0:
        tile = Tile(1, config.team * config.vecs)
    span = tile.vecs * VEC8 * config.teams_x * config.repeat
    constants = {
        "FP8_ALIGNMENT": problem.alignment,
        "FP8_TEAM": config.team,
        "FP8_VECTORS": config.vecs,
        "FP8_REPEAT": config.repeat,
        "FP8_TEAMS_X": config.teams_x,
        "FP8_CLUSTER": config.blocks,
        "FP8_DOWN": int(problem.scale_layout == "mn"),
        "FP8_EARLY": int(tile.rows == 1 and few(problem, most_rows)),
        "FP8_TILE_ROWS": tile.rows,
        "FP8_TILE_VECS": tile.vecs,
        "FP8_TAIL": 2 if cols % VEC8 else 1 if cols % span or not cols else 0,
    }
    run = prepare(problem, "rowwise", config.threads, constants, cluster=config.blocks)
    block_rows = config.threads * config.blocks // config.team // config.teams_x * tile.rows
    across = max(ceil_div(cols, span), 1) * config.blocks

    # Blocks side by side run concurrently, so memory is read and written row by row.
    return lambda rows: (run, (across, *folded(ceil_div(rows, block_rows))))
