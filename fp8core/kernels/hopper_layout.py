"""How a product of few rows lies on the multiprocessors of a Hopper GPU: plain arithmetic, for `hopper`."""

from functools import cache
from typing import Final, NamedTuple

from fp8core.kernels.words import ceil_div
from fp8core.problem import Target

MOST_ROWS: Final = 64
"""Rows of a that one launch takes."""
WIDTHS: Final = (8, 16, 32, 64)
"""The narrow sides of wgmma that kernels are compiled for."""
CHUNK: Final = 128
"""Columns of k that pass through a ring at a time."""
CLUSTERS: Final = {1: 132, 2: 66, 4: 30, 8: 15}
"""How many clusters of so many blocks fit on 132 multiprocessors at one block each (H200, by the driver's count)."""


class Way(NamedTuple):
    """How the threads of a multiprocessor share its work."""

    row_groups: int
    """Groups of 128 threads that have 64 channels of a tile each."""
    k_groups: int
    """Groups that take the chunks of the same channels in turn."""
    residents: int
    """Blocks of a multiprocessor: of several, some can be the next product's, which read their weight meanwhile."""
    chunk_us: float
    """Of a block alone on its multiprocessor, for 64 channels of a chunk."""
    tile_us: float
    """Of a block, for the end of a tile."""
    mates: int = 1
    """Tiles of a cluster, whose blocks share what they load of a."""
    a_stages: int = 0
    """Chunks of a in flight, if not as many as by the rule."""
    paced: bool = False
    """Whether little of the weight is in flight at first."""


class Rule(NamedTuple):
    """How layouts are chosen: fitted to sweeps on an H200 (docs/decode.md)."""

    ways: tuple[Way, ...]
    """To choose from, of equals the first."""
    exchange_us: float
    """Of a product, for every block of a cluster but the first, to whom it gives its partial sums."""
    a_stages: int
    """Chunks of a in flight for one block a multiprocessor; of several, each has its part."""
    group_us: float = 0.0
    """More of that, for every group but the first that has the same channels."""
    conflict: float = 0.025
    """The part of the memory's time that is lost where all blocks read the same columns of the weight at a time. Where
    k is split over a cluster they read as many places at a time as it has blocks, and lose less."""
    late_us: float = 0.0
    """Of a block, for every chunk that its ring does not hold from the start: only a chunk that is used makes room."""
    crowd_us: float = 0.0
    """Of a product whose blocks take every place, so that its successor's find none; of half the places, nothing."""
    small: "Rule | None" = None
    """What holds instead for small weights, of up to ``rings`` times what the rings of all multiprocessors hold."""
    rings: float = 0.0


WEIGHT_BYTES_A_US: Final = 4.3e6
"""What the memory of an H200 gives."""
WEIGHT_RING_BYTES: Final = 192 << 10
"""Of the weight, in a multiprocessor's rings, roughly."""


def rule(side: int, blockwise: bool) -> Rule:
    """Return the rule for ``side`` (padded) rows."""
    if side == MOST_ROWS:
        one, s = (0.03, 0.006) if blockwise else (0.0, 0.0)
        narrow = Way(1, 1, 1, 0.227 + one, 1.5), Way(1, 2, 1, 0.195 + s, 2.1)
        wide = Way(2, 1, 1, 0.18 + s, 2.1, a_stages=8), Way(2, 1, 1, 0.176 + s, 2.4, mates=2, a_stages=8)
        return _paced_if_small(Rule((*narrow, *wide), 0.61, 12, group_us=0.61))
    if side == 32:
        narrow = Way(1, 2, 1, 0.165, 4.3), Way(1, 1, 2, 0.168, 1.5)
        wide = Way(2, 1, 1, 0.158, 1.8, a_stages=8), Way(2, 1, 1, 0.15, 1.8, mates=2, a_stages=8)
        return _paced_if_small(Rule((*narrow, *wide), 0.02, 12))
    beside = Way(1, 1, 2, 0.045, 2.7, paced=True), Way(1, 1, 3, 0.03, 2.7, paced=True)
    small = Rule(beside, 0.01, 24 if side == 8 else 16, conflict=0.15, late_us=0.3, crowd_us=0.1)
    return Rule((Way(1, 2, 1, 0.165, 1.3), Way(1, 1, 2, 0.14, 1.3, paced=True)), 0.04, 16, small=small, rings=2.0)


def _paced_if_small(chosen: Rule) -> Rule:
    """Return a rule of more than 16 rows: small weights were measured paced and without mates, large ones otherwise."""
    ways = tuple(way._replace(paced=True) for way in chosen.ways if way.mates == 1)
    return chosen._replace(small=chosen._replace(ways=ways), rings=1.25)


class Layout(NamedTuple):
    """How a product lies on the multiprocessors."""

    blocks: int
    """Of a tile: each takes a part of k."""
    clusters: int
    row_groups: int
    k_groups: int
    residents: int
    a_stages: int
    """Chunks of a in flight."""
    ahead: int = 0
    """Chunks of the weight in flight until a may be asked for; 0: as many as fit."""
    spare: int = 0
    """Bytes of a multiprocessor's shared memory that are left to the kernel that follows."""
    mates: int = 1
    """Tiles that a cluster has at a time: the blocks of one part of k share what they load of a, eight rows or more."""

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.blocks * self.mates

    @property
    def tile(self) -> int:
        """Channels of a tile."""
        return 64 * self.row_groups


def width(m: int) -> int:
    """Return the narrow side of wgmma that holds ``m`` rows."""
    return next(side for side in WIDTHS if side >= m)


def room(target: Target) -> dict[int, int]:
    """Return how many clusters of each size a device holds at a time, one block a multiprocessor."""
    return {blocks: count * target.multiprocessors // 132 for blocks, count in CLUSTERS.items()}


@cache
def layout(n: int, k: int, chosen: Rule, target: Target) -> Layout:
    """Return how the product of a weight ``[n, k]`` is laid out: in the least time, of equals with the fewest blocks.

    The time is, by ``chosen``, that of the memory or of the busiest block, whichever is longer, and the ends.
    """
    chunks = ceil_div(k, CHUNK)
    if chosen.small and n * k <= chosen.rings * target.multiprocessors * WEIGHT_RING_BYTES:
        chosen = chosen.small

    def cost(way: Way, plan: Layout) -> tuple[float, int]:
        tiles, part = ceil_div(n, plan.tile * plan.mates), ceil_div(chunks, plan.blocks)
        blocks = plan.cluster * plan.clusters
        memory = n * k / WEIGHT_BYTES_A_US * (1 + chosen.conflict / plan.blocks)
        chunk = plan.row_groups * plan.residents * way.chunk_us
        ring = WEIGHT_RING_BYTES / (plan.residents * plan.tile * CHUNK)
        late = chosen.late_us * max(0.0, part * tiles / plan.clusters - ring)
        busiest = ceil_div(tiles, plan.clusters) * (part * chunk + way.tile_us) + late
        exchange = (chosen.exchange_us + chosen.group_us * (plan.k_groups - 1)) * (plan.blocks - 1)
        crowd = chosen.crowd_us * max(0.0, 2 * blocks / (plan.residents * target.multiprocessors) - 1)
        return round(max(memory, busiest) + exchange + crowd, 3), blocks

    plans = []
    for way in chosen.ways:
        row_groups, k_groups, residents = way[:3]
        for cluster, most in room(target).items():
            blocks, clusters = cluster // way.mates, min(ceil_div(n, 64 * row_groups * way.mates), most * residents)
            if 1 <= blocks <= chunks and clusters:
                a_stages = (way.a_stages or chosen.a_stages) // residents
                plan = Layout(blocks, clusters, row_groups, k_groups, residents, a_stages, mates=way.mates)
                plans.append((cost(way, plan), paced(plan) if way.paced else plan))
    return min(plans, key=lambda costed: costed[0])[1]


def alone(plan: Layout, n: int) -> Layout:
    """Return a layout of ``n`` channels as it is without mates: its sums have the same order."""
    return plan._replace(mates=1, clusters=min(plan.clusters * plan.mates, ceil_div(n, plan.tile)))


AHEAD_BYTES: Final = 40 << 10
"""Of the weight, in flight on a multiprocessor until a may be asked for: more would not come sooner."""
QUANTIZER_BYTES: Final = 2048
"""Of shared memory for a block that quantizes: 1,024 that the system keeps, and its own."""


def paced(plan: Layout) -> Layout:
    """Return the layout with so little of the weight in flight at first that it keeps nobody from the memory.

    Blocks that find a place beside their predecessor have the time. One that has a multiprocessor to itself starts when
    its predecessor has ended, and is slower so, but in linear layers.
    """
    return plan._replace(ahead=ceil_div(AHEAD_BYTES, plan.tile * CHUNK * plan.residents))


def apart(plan: Layout, target: Target) -> Layout:
    """Return the layout, with the same order of sums, where the weight must not be read before the predecessor ends.

    To stand beside it is of no use then: as few blocks share a multiprocessor as it takes for all to find a place.
    """
    residents = max(2, ceil_div(plan.clusters, room(target)[plan.cluster]))
    if residents >= plan.residents:
        return plan
    return plan._replace(residents=residents, a_stages=plan.a_stages * plan.residents // residents)


def in_a_chain(plan: Layout) -> Layout:
    """Return the layout where quantizations and products take turns, as in linear layers.

    A quantization is ready to start when its predecessor ends if it finds room beside it, and both it and the product
    get their rows soon if not all of the ring stands before them in the memory's queue.
    """
    return paced(plan)._replace(spare=QUANTIZER_BYTES)


def dynamic_bytes(plan: Layout, side: int, scale_rows: int, stages_: int, target: Target) -> int:
    """Return the dynamic shared memory that a block asks for: its part of all there is.

    All, so that it is the same for every cluster that the compiled kernel serves.
    """
    # The system keeps 1,024 bytes of every block; of the first, the device's figure leaves them out.
    share = (target.shared_bytes - plan.spare) // plan.residents - 1024 * (plan.residents - 1)
    return share - fixed_bytes(plan, side, scale_rows, stages_)


def ring_bytes(plan: Layout, side: int, stages_: int) -> int:
    """Return the dynamic shared memory that a block needs: both rings, the slots of partial sums, and for aligning."""
    rings = stages_ * plan.tile * CHUNK + plan.a_stages * side * CHUNK
    units = plan.tile // 8 // plan.blocks
    return rings + (plan.blocks * plan.k_groups - 1) * units * 8 * side * 4 + 1024


def fixed_bytes(plan: Layout, side: int, scale_rows: int, stages_: int) -> int:
    """Return the static shared memory of a block, and 64 bytes for alignment.

    ``scale_rows`` channels share a scale of the weight; 0 where there is one a row or tensor.
    """
    barriers = 8 * (2 * stages_ + 2 * plan.a_stages + 3)
    scales = 4 * plan.a_stages * (side + ceil_div(plan.tile, scale_rows) + 1) if scale_rows else 0
    return barriers + scales + 4 * side + 64


def stages(plan: Layout, side: int, scale_rows: int, target: Target) -> int:
    """Return how many chunks of the weight fit into a block's ring: a multiple of the groups that take turns."""
    count = plan.k_groups
    while ring_bytes(plan, side, count + plan.k_groups) <= dynamic_bytes(
        plan, side, scale_rows, count + plan.k_groups, target
    ):
        count += plan.k_groups
    return count
