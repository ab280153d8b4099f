"""The kernels of quantization: three bodies, and which problem each of them takes."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

from fp8core import host
from fp8core.kernels.encodings import FORMAT, SCALE_FORMAT, TYPE, ceil_div
from fp8core.kernels.requirements import platform
from fp8core.kernels.tensor_teams import Team, alone, teams_of
from fp8core.kernels.tiles import OCTET, Tile, anywhere, fits, row_bounds, shape_of, tile_of
from fp8core.problem import ITEMSIZE, PER_TENSOR, PER_TOKEN, Quantize
from fp8core.runtime import device, jit
from fp8core.table import Kernel, Launch, Requirement, Table

SIGNATURE: Final = "PqPqPqqqqPffq"
"""Of every body: what a launch is called with after the stream, then cols:
x, x_stride, data, data_stride, scale, its row and column strides, rows, rows_padded, upper, upper_value, eps, cols."""
X_STRIDE, DATA_STRIDE, ROWS, ROWS_PADDED = 1, 3, 7, 8
"""Their places among the operands of a launch."""
ADDRESSES: Final = (0, 2, 4, 9)
"""The places of the operands that are addresses; all others are numbers."""
MOST_BLOCKS_Y: Final = 65_535
STATIC, TENSOR, TOKEN, GROUP = range(4)
"""The modes of cuda_src/common/quantize_scale.cuh."""


def mode(problem: Quantize) -> int:
    """Return how the scale comes about: each has a formula of its own."""
    if problem.static:
        return STATIC
    return {PER_TENSOR: TENSOR, PER_TOKEN: TOKEN}.get(problem.group_shape, GROUP)


def prepare(
    problem: Quantize,
    body: str,
    threads: int,
    constants: Mapping[str, int],
    *,
    shared_bytes: int = 0,
    cluster: int = 1,
    programmatic: bool = False,
    cooperative: bool = False,
) -> jit.Launcher:
    """Return one of the bodies, compiled with ``constants`` and what all of them are compiled with."""
    common = {
        "INPUT": TYPE[problem.x],
        "FORMAT": FORMAT[problem.data],
        "MODE": mode(problem),
        "SCALE_FORMAT": SCALE_FORMAT[problem.scale_format],
        "GROUP_ROWS": problem.group_shape.rows,
        "GROUP_COLS": problem.group_shape.cols,
        "ALIGNMENT": problem.alignment,
        "THREADS": threads,
    }
    return jit.prepare(
        problem.target,
        body,
        body,
        {**common, **constants},
        SIGNATURE,
        block=threads,
        shared_bytes=shared_bytes,
        cluster=cluster,
        programmatic=programmatic,
        cooperative=cooperative,
    )


class Body:
    """A body made ready for rows of ``cols``: ``place`` gives the launcher and the grid that suit operands.

    ``instead`` makes what runs a launch whose blocks cannot all run at once.
    """

    def __init__(
        self,
        cols: int,
        place: Callable[..., tuple[jit.Launcher, jit.Grid]],
        instead: Callable[[], "Body"] | None = None,
    ) -> None:
        self._cols, self._place, self._instead = cols, place, instead

    def __call__(self, stream: int, *operands: Any) -> None:
        """Launch, unless there are no rows."""
        self.bind(*(operands[i] for i in range(len(operands)) if i not in ADDRESSES))(
            stream, *(operands[i] for i in ADDRESSES)
        )

    def bind(self, *numbers: Any) -> Launch:
        """Return the launch with its numbers: it is called with the stream and the addresses."""
        run, grid = self._place(operands_of((0,) * len(ADDRESSES), numbers))
        if not all(grid):
            return lambda _stream, *_addresses: None
        launch = run.bind(grid, *numbers, self._cols)
        if self._instead is None:
            return launch
        instead = self._instead
        return together(launch, grid[0], lambda: instead().bind(*numbers))


STREAMS_KNOWN: Final = 4096
"""Streams of which a launch remembers that they have room for its blocks."""


def together(launch: Launch, blocks: int, instead: Callable[[], Launch]) -> Launch:
    """Return ``launch``, whose ``blocks`` have to run at once, or where they cannot what ``instead`` makes.

    A green context, or MPS, gives a stream some of the multiprocessors. The driver refuses the launch then, and nothing
    has run. But a refusal while the stream is captured is the graph's, so a stream is asked before its first launch.
    (An address that is later another stream's may be remembered wrongly: then the driver's refusal is what counts.)
    """
    known: set[int] = set()
    other = cache(instead)

    def fits(stream: int) -> bool:
        places = device.multiprocessors(stream)
        if places is not None and places < blocks:
            return False
        if len(known) >= STREAMS_KNOWN:
            known.clear()
        known.add(stream)
        return True

    def run(stream: int, x: int, data: int, scale: int, upper: int) -> None:
        if stream in known or fits(stream):
            try:
                return launch(stream, x, data, scale, upper)
            except device.LaunchError as error:
                if error.status not in device.TOO_LARGE:
                    raise
        return other()(stream, x, data, scale, upper)

    return run


def operands_of(addresses: tuple[int, ...], numbers: tuple[int | float, ...]) -> tuple[int | float, ...]:
    """Return the operands of a launch of which some are addresses and the others numbers."""
    rest, places = iter(numbers), dict(zip(ADDRESSES, addresses, strict=True))
    return tuple(places[i] if i in places else next(rest) for i in range(len(addresses) + len(numbers)))


def bind(launch: Launch, *numbers: int | float) -> Launch:
    """Return ``launch`` with its numbers, for one row or more: it wants the stream and x, data, scale and upper."""
    if isinstance(launch, Body):
        return launch.bind(*numbers)
    return lambda stream, *addresses: launch(stream, *operands_of(addresses, numbers))


# ---- a tile in registers -----------------------------------------------------------------------------


def plan_tile(problem: Quantize) -> Launch:
    """Return the launch of quantize_tile or quantize_anywhere: every element is read once and written once."""
    bounds = row_bounds(problem)

    @cache  # compiled when so many rows first come up
    def tiles(most_rows: int) -> Callable[[int], tuple[jit.Launcher, jit.Grid]]:
        return (_tiles_anywhere if anywhere(problem) else _tiles)(problem, most_rows)

    def place(operands: Any) -> tuple[jit.Launcher, jit.Grid]:
        rows = operands[ROWS_PADDED]
        return tiles(bounds[bisect_left(bounds, rows)])(rows)

    return Body(problem.cols, place)


def _tiles(problem: Quantize, most_rows: int) -> Callable[[int], tuple[jit.Launcher, jit.Grid]]:
    """Return what gives the kernel for up to ``most_rows`` rows, and the grid for some of them."""
    cols, tile = problem.cols, tile_of(problem, most_rows)
    shape = shape_of(problem, tile, most_rows)
    if tile.rows == 1 and problem.group_shape.cols < 0:
        tile = Tile(1, shape.team * shape.vectors)
    span = tile.octets * OCTET * shape.teams_x * shape.repeat
    constants = {
        "TEAM": shape.team,
        "VECTORS": shape.vectors,
        "REPEAT": shape.repeat,
        "TEAMS_X": shape.teams_x,
        "CLUSTER": shape.blocks,
        "DOWN": int(problem.scale_layout == "mn"),
        "TILE_ROWS": tile.rows,
        "TILE_OCTETS": tile.octets,
        "EDGE": 2 if cols % OCTET else 1 if cols % span or not cols else 0,
    }
    run = prepare(problem, "quantize_tile", shape.threads, constants, cluster=shape.blocks, programmatic=True)
    block_rows = shape.threads * shape.blocks // shape.team // shape.teams_x * tile.rows
    across = max(ceil_div(cols, span), 1) * shape.blocks

    # Blocks side by side run together: memory is read and written row by row.
    return lambda rows: (run, (across, *_folded(ceil_div(rows, block_rows))))


def _tiles_anywhere(problem: Quantize, most_rows: int) -> Callable[[int], tuple[jit.Launcher, jit.Grid]]:
    """Return what `_tiles` does, where rows begin anywhere."""
    tile = tile_of(problem, most_rows)
    shape = shape_of(problem, tile, most_rows)
    # The last part of a row has the elements behind its whole octets; a group has its columns and no more.
    across = ceil_div(problem.cols, tile.octets * OCTET)
    if problem.group_shape.cols < 0:
        across = ceil_div(problem.cols // OCTET, tile.octets)
    across = max(across, 1)
    if across == 1 and tile.rows == 1:
        tile = Tile(1, shape.team * shape.vectors)  # of whatever columns
    teams = shape.threads // shape.team
    constants = {
        "TEAM": shape.team,
        "VECTORS": ceil_div(tile.rows * tile.octets, shape.team),
        "TILE_ROWS": tile.rows,
        "TILE_OCTETS": tile.octets,
        "ACROSS": across,
    }
    run = prepare(problem, "quantize_anywhere", shape.threads, constants, programmatic=True)

    nothing = not problem.cols and problem.group_shape.cols > 0  # no groups, no scales

    def sized(rows: int) -> tuple[jit.Launcher, jit.Grid]:
        down = 0 if nothing else ceil_div(rows, tile.rows)
        return run, (min(across, ceil_div(down * across, teams)), *_folded(ceil_div(down, teams)))

    return sized


def _folded(blocks: int) -> tuple[int, int]:
    """Return the rows' blocks over y and z."""
    folds = max(ceil_div(blocks, MOST_BLOCKS_Y), 1)
    return ceil_div(blocks, folds), folds


# ---- a tensor, in one launch --------------------------------------------------------------------------


def plan_tensor(problem: Quantize) -> Launch:
    """Return the launch of quantize_tensor: every element is read once, or twice where the device cannot hold all."""
    cols, multiprocessors, octet = problem.cols, problem.target.multiprocessors, OCTET * ITEMSIZE[problem.x]
    choices = {flat: teams_of(problem, flat) for flat in (False, True)}

    @cache
    def run(team: Team, flat: bool) -> jit.Launcher:
        constants = {
            "CLUSTER": team.cluster,
            "KEPT": team.kept,
            "SHARED_OCTETS": team.shared,
            "CHUNK": team.chunk,
            "WHOLE": int(team.whole),
            "FLAT": int(flat),
        }
        return prepare(
            problem,
            "quantize_tensor",
            team.threads,
            constants,
            shared_bytes=team.shared * team.threads * octet,
            cluster=max(team.cluster, 1),
            programmatic=True,
            cooperative=team.cluster == 0,
        )

    def place(operands: Any) -> tuple[jit.Launcher, jit.Grid]:
        rows = operands[ROWS]
        flat = rows == 1 or operands[X_STRIDE] == operands[DATA_STRIDE] == cols
        keeps, teams = choices[flat]
        octets = rows * cols // OCTET if flat else rows * ceil_div(cols, OCTET)
        team = teams[bisect_left(keeps, octets)]
        return run(team, flat), (team.cluster or multiprocessors, 1, 1)

    return Body(cols, place, cache(lambda: plan_strip(problem)))


# ---- strips, one element at a time -------------------------------------------------------------------


class Strip(NamedTuple):
    """What a block of quantize_strip handles: ``height`` rows (-1: all) of ``width`` columns (0: all)."""

    threads: int
    height: int
    width: int
    groups: int


def strip_of(problem: Quantize) -> Strip:
    """Return the strip: whole groups side by side, for loads that stay together."""
    group = problem.group_shape
    if problem.static:
        return Strip(256, 16, 256, 1)
    if group.cols < 0:
        return Strip(1024, group.rows, 0, 1)
    threads, wanted = (256, 256) if group.rows == 1 else (1024, 64)
    groups = max(wanted // group.cols, 1)
    return Strip(threads, group.rows, groups * group.cols, groups)


def plan_strip(problem: Quantize) -> Body:
    """Return the launch of quantize_strip."""
    cols, strip = problem.cols, strip_of(problem)
    constants = {"HEIGHT": strip.height, "WIDTH": strip.width, "GROUPS": strip.groups}
    run = prepare(problem, "quantize_strip", strip.threads, constants, programmatic=True)
    blocks_y = min(max(ceil_div(cols, strip.width), 1), MOST_BLOCKS_Y) if strip.width else 1

    def place(operands: Any) -> tuple[jit.Launcher, jit.Grid]:
        blocks = 1 if strip.height < 0 else ceil_div(operands[ROWS_PADDED], strip.height)
        return run, (blocks, blocks_y, 1)

    return Body(cols, place)


# ---- the table ---------------------------------------------------------------------------------------


def _whole_octets(problem: Quantize) -> bool:
    return problem.group_shape.cols < 0 or problem.group_shape.cols % OCTET == 0


def _has_tiles(problem: Quantize) -> bool:
    group = problem.group_shape
    return problem.static or group == PER_TOKEN or (group.rows > 0 and group.cols > 0)


ON_A_GPU: Final = platform("cuda", "hip")

QUANTIZE: Final = Table(
    "quantize",
    Quantize,
    Kernel("host", (platform("host"),), host.plan_quantize),
    Kernel(
        "tile_in_registers",
        (
            ON_A_GPU,
            Requirement(_has_tiles, "needs tokens, groups, blocks or a given scale, got {p.group_shape}"),
            Requirement(_whole_octets, "needs groups whose columns are a multiple of 8, got {p.group_shape}"),
            Requirement(fits, "needs a group that fits registers, got {p.group_shape} of {p.cols} columns"),
            Requirement(lambda p: p.cols <= 1 << 28, "needs at most 2**28 columns, got {p.cols}"),
        ),
        plan_tile,
    ),
    Kernel(
        "tensor_on_resident_grid",
        (
            ON_A_GPU,
            Requirement(lambda p: mode(p) == TENSOR, "needs one scale found for the whole tensor, got {p.group_shape}"),
            Requirement(alone, "needs blocks sure to have a multiprocessor for themselves, got {p.target}"),
        ),
        plan_tensor,
        note="launches by strip where its blocks cannot all run at once (a green context, MPS)",
    ),
    Kernel("strip", (ON_A_GPU,), plan_strip),
)
"""By preference: what reads everything once, what reads little of it twice, and what takes anything."""
