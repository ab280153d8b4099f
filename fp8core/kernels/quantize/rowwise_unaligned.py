"""`rowwise` for rows that may begin at any element."""

from collections.abc import Callable

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.quantize.configs import VEC8, WARP_TEAM, Tile, few, has_groups, rowwise_config, tile_of
from fp8core.kernels.quantize.prepare import Chosen, folded, prepare
from fp8core.kernels.quantize.rowwise import by_rows
from fp8core.problem import Quantize
from fp8core.runtime.plans import Plan, QuantizeNumbers


def plan_rowwise_unaligned(problem: Quantize) -> Plan[QuantizeNumbers]:
    """Return the plan of cuda_src/quantize/rowwise_unaligned.cuh, and of groups_unaligned.cuh for few elements."""
    return by_rows(problem, _configured)


def _configured(problem: Quantize, most_rows: int) -> Callable[[int], Chosen]:
    """Return a function of a number of rows, up to ``most_rows``, that gives the kernel and the grid."""
    tile = tile_of(problem, most_rows)
    config = rowwise_config(problem, tile, most_rows)
    # The last tile of a row also has the elements after its whole vectors; a group has only its columns.
    across = ceil_div(problem.cols, tile.vecs * VEC8)
    if problem.group_shape.cols < 0:
        across = ceil_div(problem.cols // VEC8, tile.vecs)
    across = max(across, 1)
    if across == 1 and tile.rows == 1:
        tile = Tile(1, config.team * config.vecs)  # for any number of columns
    teams = config.threads // config.team
    early = few(problem, most_rows) and (tile.rows == 1 or config.team <= problem.target.warp)
    constants = {
        "FP8_TEAM": config.team,
        "FP8_VECTORS": ceil_div(tile.rows * tile.vecs, config.team),
        "FP8_EARLY": int(early),
        "FP8_TILE_ROWS": tile.rows,
        "FP8_TILE_VECS": tile.vecs,
        "FP8_ACROSS": across,
    }
    in_warps = config.team <= WARP_TEAM and config.team * config.vecs == tile.vecs
    slim = in_warps and has_groups(problem) and few(problem, most_rows)
    run = prepare(problem, "groups_unaligned" if slim else "rowwise_unaligned", config.threads, constants)
    without_groups = not problem.cols and problem.group_shape.cols > 0  # and so no scales

    def sized(rows: int) -> Chosen:
        down = 0 if without_groups else ceil_div(rows, tile.rows)
        return run, (min(across, ceil_div(down * across, teams)), *folded(ceil_div(down, teams)))

    return sized
