"""How a product of few rows is laid out on a Hopper GPU: a cost model and plain arithmetic, for `decode`."""

from functools import cache
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.problem import BLOCK, Target

MOST_ROWS: Final = 64
"""Rows of a that one launch takes."""
WIDTHS: Final = (8, 16, 32, 64)
"""The N sides of wgmma that kernels are compiled for: the rows of a, padded. (Its M side holds output channels.)"""
BLOCK_K: Final = BLOCK
"""Columns of k in a stage of a ring: a k-block."""
MEASURED_MULTIPROCESSORS: Final = 132
"""Of the H200 that all numbers of this module were fitted on."""
CLUSTERS: Final = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
"""How many clusters of so many blocks fit on such a device at one block each (by the driver's count)."""
POWERS: Final = (1, 2, 4, 8)
"""The clusters of sm90_decode: each block completes an equal part of the channels."""
WEIGHT_BYTES_A_US: Final = 4.3e6
"""The memory's bandwidth there."""
WEIGHT_RING_BYTES: Final = 192 << 10
"""Of the weight, in a multiprocessor's rings, roughly."""


class TileConfig(NamedTuple):
    """A candidate: how the warpgroups of a multiprocessor share its work, and what that was measured to cost."""

    m_warpgroups: int
    """Consumer warpgroups that have 64 channels of a tile each."""
    k_warpgroups: int
    """Consumer warpgroups that alternate over the k-blocks of the same channels."""
    ctas_per_sm: int
    """Of several, some can be the next product's, which prefetch their weight meanwhile."""
    k_block_us: float
    """Of a block that has a multiprocessor to itself, for 64 channels of a k-block."""
    tile_us: float
    """Of a block, for the epilogue of a tile."""
    multicast_tiles: int = 1
    """Tiles of a cluster, whose blocks share what they load of a."""
    a_stages: int = 0
    """k-blocks of a in flight; 0: as many as the cost model says."""
    limit_prefetch: bool = False
    """Whether little of the weight is in flight at first."""


class CostModel(NamedTuple):
    """What a config is chosen by: terms fitted to sweeps on an H200 (experiments/2026-11-decode), in microseconds."""

    configs: tuple[TileConfig, ...]
    """The candidates; of equals the first."""
    reduce_us: float
    """Of a product, for every block that k is split over but the first: the reduction of partial sums."""
    a_stages: int
    """k-blocks of a in flight with one block a multiprocessor; of several, each has its part."""
    reduce_warpgroup_us: float = 0.0
    """More of that, for every warpgroup but the first that has the same channels."""
    conflict: float = 0.025
    """The part of the memory's time that is lost where all blocks read the same columns of the weight at a time. Where
    k is split over a cluster they read as many places at a time as it has blocks, and lose less."""
    refill_us: float = 0.0
    """Of a block, for every k-block that its ring does not hold from the start: only one that is used makes room."""
    occupancy_us: float = 0.0
    """Penalty where this kernel occupies every block slot, so that the next kernel's blocks cannot be co-resident; 0 at
    half occupancy."""
    hidden_tiles: int = 0
    """Tiles of a multiprocessor whose reductions the ring hides."""
    exposed_us: float = 0.0
    """Of a product, for every tile beyond them and for every block that k is split over but the first."""
    small: "CostModel | None" = None
    """What holds instead for small weights, of up to ``small_rings`` times what the rings of all SMs hold."""
    small_rings: float = 0.0


_ABOVE_16: Final = CostModel((), 0.02, 12, hidden_tiles=1, exposed_us=0.05)
_FULL: Final = CostModel((), 0.61, 12, reduce_warpgroup_us=0.61)
_CONFIGS_32: Final = (
    TileConfig(1, 2, 1, 0.165, 4.3),
    TileConfig(1, 1, 2, 0.168, 1.5),
    TileConfig(2, 1, 1, 0.158, 1.8, a_stages=8),
)
_CONFIGS_64: Final = (
    TileConfig(1, 1, 1, 0.227, 1.5),
    TileConfig(1, 2, 1, 0.195, 2.1),
    TileConfig(2, 1, 1, 0.18, 2.1, a_stages=8),
    TileConfig(2, 1, 1, 0.176, 2.4, multicast_tiles=2, a_stages=8),
)
_CONFIGS_64_BLOCKWISE: Final = tuple(
    config._replace(k_block_us=config.k_block_us + more)
    for config, more in zip(_CONFIGS_64, (0.03, 0.006, 0.006, 0.006), strict=True)
)
_CONFIGS_16: Final = (TileConfig(1, 2, 1, 0.165, 1.3), TileConfig(1, 1, 2, 0.14, 1.3, limit_prefetch=True))
_CONFIGS_16_SMALL: Final = (
    TileConfig(1, 1, 2, 0.045, 2.7, limit_prefetch=True),
    TileConfig(1, 1, 3, 0.03, 2.7, limit_prefetch=True),
)


def cost_model(width_: int, blockwise: bool) -> CostModel:
    """Return the cost model of a width, with scales that change along k (``blockwise``) or not."""
    if width_ == MOST_ROWS:
        return _limited_if_small(_FULL._replace(configs=_CONFIGS_64_BLOCKWISE if blockwise else _CONFIGS_64))
    if width_ == 32:
        return _limited_if_small(_ABOVE_16._replace(configs=_CONFIGS_32))
    a_stages = 24 if width_ == 8 else 16
    small = CostModel(_CONFIGS_16_SMALL, 0.01, a_stages, conflict=0.15, refill_us=0.3, occupancy_us=0.1)
    return CostModel(_CONFIGS_16, 0.04, 16, hidden_tiles=4, exposed_us=0.01, small=small, small_rings=2.0)


def _limited_if_small(model: CostModel) -> CostModel:
    """Return a model of more than 16 rows: small weights were measured with a limited prefetch, without multicast."""
    configs = tuple(c._replace(limit_prefetch=True) for c in model.configs if c.multicast_tiles == 1)
    return model._replace(small=model._replace(configs=configs, exposed_us=0.0), small_rings=1.25)


class DecodeConfig(NamedTuple):
    """How a product is laid out: the constants that its kernel is compiled with, and its grid."""

    split_k: int
    """Blocks of a tile: each takes a part of k."""
    clusters: int
    m_warpgroups: int
    k_warpgroups: int
    ctas_per_sm: int
    a_stages: int
    """k-blocks of a in flight."""
    prefetch_chunks: int = 0
    """k-blocks of the weight in flight until a has been requested; 0: as many as fit."""
    spare_bytes: int = 0
    """Of a multiprocessor's shared memory, left to the kernel that follows."""
    multicast_tiles: int = 1
    """Tiles that a cluster has at a time: the blocks of one part of k share what they load of a, eight rows or more."""
    warpgroup_channels: int = 64
    """Channels of a tile that a warpgroup has: 64 on wgmma's M side, 64 to 128 on its N side."""
    rows_first: bool = False
    """Whether the rows of a are on wgmma's M side (sm90_decode_rows)."""

    phases: int = 0
    """Residues of channels with tensor maps of their own, for a weight at any address; 0: one map has all."""
    ahead_bytes: int = 64 << 10
    """Of the weight, on a multiprocessor, asked for into L2 when the ring is full and a is not there yet
    (experiments/2026-11-ahead-of-the-ring)."""

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.split_k * self.multicast_tiles

    @property
    def tile(self) -> int:
        """Channels of a tile."""
        return self.warpgroup_channels * self.m_warpgroups

    @property
    def weight_columns(self) -> int:
        """Columns of k in a box of the weight: those of a k-block, and where rows are aligned in registers 16 more."""
        return BLOCK_K + 16 * (self.phases > 0)

    @property
    def ahead_chunks(self) -> int:
        """k-blocks that a block asks for into L2."""
        return self.ahead_bytes // (self.tile * BLOCK_K * self.ctas_per_sm)

    def weight_scales(self, scale_rows: int) -> int:
        """Return how many scales a tile has of a k-block, each of ``scale_rows`` channels, or one more."""
        return ceil_div(self.tile * max(1, self.phases), scale_rows) if scale_rows > 1 else self.tile

    @property
    def own_units(self) -> int:
        """Units of 8 channels of a tile that a block completes at most; sm90_decode_rows deals them out in pairs."""
        units = self.tile // 8
        dealt = 2 if self.rows_first and units >= 4 * self.split_k else 1
        return ceil_div(ceil_div(units, dealt), self.split_k) * dealt


def width(m: int) -> int:
    """Return the N side of wgmma that holds ``m`` rows."""
    return next(side for side in WIDTHS if side >= m)


def clusters_at_once(target: Target) -> dict[int, int]:
    """Return how many clusters of each size a device holds at a time, one block a multiprocessor."""
    return {blocks: count * target.multiprocessors // MEASURED_MULTIPROCESSORS for blocks, count in CLUSTERS.items()}


def cost(n: int, k: int, model: CostModel, tile: TileConfig, config: DecodeConfig, target: Target) -> tuple[float, int]:
    """Return the microseconds of a product by a model, that of the memory or of the busiest block, and its blocks."""
    k_blocks = ceil_div(k, BLOCK_K)
    tiles, part = ceil_div(n, config.tile * config.multicast_tiles), ceil_div(k_blocks, config.split_k)
    blocks = config.cluster * config.clusters
    memory = n * k / WEIGHT_BYTES_A_US * (1 + model.conflict / config.split_k)
    k_block = config.m_warpgroups * config.ctas_per_sm * tile.k_block_us
    ring = WEIGHT_RING_BYTES / (config.ctas_per_sm * config.tile * BLOCK_K)
    refill = model.refill_us * max(0.0, part * tiles / config.clusters - ring)
    busiest = ceil_div(tiles, config.clusters) * (part * k_block + tile.tile_us) + refill
    reduction = (model.reduce_us + model.reduce_warpgroup_us * (config.k_warpgroups - 1)) * (config.split_k - 1)
    exposed = max(0.0, tiles * config.ctas_per_sm / config.clusters - model.hidden_tiles)
    reduction += model.exposed_us * exposed * (config.split_k - 1)
    occupied = 2 * blocks / (config.ctas_per_sm * target.multiprocessors) - 1
    return round(max(memory, busiest) + reduction + model.occupancy_us * max(0.0, occupied), 3), blocks


@cache
def cheapest(n: int, k: int, model: CostModel, target: Target) -> DecodeConfig:
    """Return the config of least cost for a weight ``[n, k]``; of equals the one with the fewest blocks."""
    if model.small and n * k <= model.small_rings * target.multiprocessors * WEIGHT_RING_BYTES:
        model = model.small
    costed = []
    for tile in model.configs:
        m_warpgroups, k_warpgroups, ctas_per_sm = tile[:3]
        channels = 64 * m_warpgroups * tile.multicast_tiles
        for cluster, most in clusters_at_once(target).items():
            if cluster not in POWERS:
                continue
            split_k, clusters = cluster // tile.multicast_tiles, min(ceil_div(n, channels), most * ctas_per_sm)
            if 1 <= split_k <= ceil_div(k, BLOCK_K) and clusters:
                config = DecodeConfig(
                    split_k,
                    clusters,
                    m_warpgroups,
                    k_warpgroups,
                    ctas_per_sm,
                    (tile.a_stages or model.a_stages) // ctas_per_sm,
                    multicast_tiles=tile.multicast_tiles,
                )
                price = cost(n, k, model, tile, config, target)
                costed.append((price, limit_prefetch(config) if tile.limit_prefetch else config))
    return min(costed, key=lambda pair: pair[0])[1]


def without_multicast(config: DecodeConfig, n: int) -> DecodeConfig:
    """Return the config for ``n`` channels with a cluster a tile: its sums have the same order."""
    return config._replace(
        multicast_tiles=1, clusters=min(config.clusters * config.multicast_tiles, ceil_div(n, config.tile))
    )


AHEAD_FROM: Final = 48e6
"""Of the weight: smaller ones, of which the rings hold much, were not faster with some of it asked for into L2."""
PREFETCH_BYTES: Final = 40 << 10
"""Of the weight, in flight on a multiprocessor until a has been requested: more would not come sooner."""
QUANTIZER_BYTES: Final = 2048
"""Of shared memory for a block that quantizes: 1,024 that the system keeps, and its own."""
LARGE_BYTES: Final = 300e6
"""Of a weight, from which room for two such blocks, and twice as much of it asked for into L2, were faster."""


def limit_prefetch(config: DecodeConfig) -> DecodeConfig:
    """Return the config with a limited prefetch, which leaves bandwidth to the predecessor.

    Blocks that are co-resident with their predecessor's have the time. One that has a multiprocessor to itself starts
    when its predecessor has ended, and is slower so, except in linear layers.
    """
    return config._replace(prefetch_chunks=ceil_div(PREFETCH_BYTES, config.tile * BLOCK_K * config.ctas_per_sm))


def without_prefetch(config: DecodeConfig, target: Target) -> DecodeConfig:
    """Return the config, with the same order of sums, where the weight must not be read before the predecessor ends.

    To be co-resident with it is of no use then: as few blocks share a multiprocessor as it takes to place them all.
    """
    ctas_per_sm = max(2, ceil_div(config.clusters, clusters_at_once(target)[config.cluster]))
    if ctas_per_sm >= config.ctas_per_sm:
        return config
    return config._replace(ctas_per_sm=ctas_per_sm, a_stages=config.a_stages * config.ctas_per_sm // ctas_per_sm)


def for_linear(config: DecodeConfig, weight_bytes: int = 0) -> DecodeConfig:
    """Return the config where quantizations and products alternate, as in linear layers.

    A quantization is ready to start when its predecessor ends if it finds room beside it, and both it and the product
    get their rows soon if not all of the ring stands before them in the memory's queue.
    """
    config = limit_prefetch(config)
    if weight_bytes > LARGE_BYTES:
        return config._replace(spare_bytes=2 * QUANTIZER_BYTES, ahead_bytes=2 * config.ahead_bytes)
    return config._replace(spare_bytes=QUANTIZER_BYTES)


def dynamic_bytes(config: DecodeConfig, side: int, scale_rows: int, stages_: int, target: Target) -> int:
    """Return the dynamic shared memory that a block asks for: its part of all there is.

    All, so that it is the same for every cluster that the compiled kernel serves.
    """
    # The system keeps 1,024 bytes of every block; of the first, the device's figure leaves them out.
    share = (target.shared_bytes - config.spare_bytes) // config.ctas_per_sm - 1024 * (config.ctas_per_sm - 1)
    return share - fixed_bytes(config, side, scale_rows, stages_)


def ring_bytes(config: DecodeConfig, side: int, stages_: int) -> int:
    """Return the dynamic shared memory that a block needs: both rings, the reduction's buffers, and for aligning."""
    rings = stages_ * config.tile * config.weight_columns + config.a_stages * side * BLOCK_K
    return rings + (config.split_k * config.k_warpgroups - 1) * config.own_units * 8 * side * 4 + 1024


def fixed_bytes(config: DecodeConfig, side: int, scale_rows: int, stages_: int) -> int:
    """Return the static shared memory of a block, and 64 bytes for alignment.

    ``scale_rows`` channels share a scale of the weight; 0 where there is one a row or tensor.
    """
    barriers = 8 * (2 * stages_ + 2 * config.a_stages + 3)
    scales = 4 * config.a_stages * (side + config.weight_scales(scale_rows) + 1) if scale_rows else 0
    of_channels = 16 * config.tile if config.rows_first else 0
    return barriers + scales + of_channels + 4 * side + 64


def stages(config: DecodeConfig, side: int, scale_rows: int, target: Target) -> int:
    """Return how many k-blocks of the weight fit into a block's ring: a multiple of the warpgroups that alternate."""
    step = config.k_warpgroups
    count = step
    while ring_bytes(config, side, count + step) <= dynamic_bytes(config, side, scale_rows, count + step, target):
        count += step
    return count
