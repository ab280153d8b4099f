"""Layouts of products with the weight's channels on wgmma's M side: the config of least cost by a model."""

from functools import cache
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K, MOST_ROWS, DecodeConfig, clusters_at_once, limit_prefetch
from fp8core.target import Target

POWERS: Final = (1, 2, 4, 8)
"""Cluster sizes of sm90_decode, in which each block completes an equal part of the channels."""
WEIGHT_BYTES_A_US: Final = 4.3e6
"""Memory bandwidth for the weight, in bytes per microsecond."""
WEIGHT_RING_BYTES: Final = 192 << 10
"""Bytes of the weight that the rings of a multiprocessor hold, roughly."""
LIMITED_RINGS: Final = 1.25
"""With more than 16 rows, the prefetch of a weight is limited if it is up to so many times what all SMs' rings hold."""


class TileConfig(NamedTuple):
    """A candidate: how the warpgroups of a multiprocessor divide its work, and the measured costs of that."""

    m_warpgroups: int
    """Consumer warpgroups of different channels, 64 of a tile each."""
    k_warpgroups: int
    """Consumer warpgroups that alternate over the k-blocks of the same channels."""
    ctas_per_sm: int
    """Blocks per multiprocessor: of several, some can be the next product's, which prefetch their weight."""
    k_block_us: float
    """Time of a block that has a multiprocessor to itself, per 64 channels of a k-block."""
    tile_us: float
    """Time of a block for the epilogue of a tile."""
    multicast_tiles: int = 1
    """Tiles of a cluster, whose blocks multicast their loads of a."""
    a_stages: int = 0
    """k-blocks of a in flight; 0: as many as the cost model says."""
    limit_prefetch: bool = False
    """Whether only little of the weight is in flight until a has been requested."""


class CostModel(NamedTuple):
    """The cost of a config in microseconds: terms fitted to sweeps on an H200 (experiments/2026-11-decode)."""

    configs: tuple[TileConfig, ...]
    """The candidates; of equal ones the first is chosen."""
    reduce_us: float
    """Time of a product's split-K reduction, per block of a tile beyond the first."""
    a_stages: int
    """k-blocks of a in flight per multiprocessor, which its blocks divide among them."""
    reduce_warpgroup_us: float = 0.0
    """Addition to `reduce_us`, per warpgroup of the same channels beyond the first."""
    conflict: float = 0.025
    """Fraction of the memory's time that is lost if all blocks read the same columns of the weight at the same time.
    With split k, the blocks of a cluster read different columns, and the loss is divided by their number."""
    refill_us: float = 0.0
    """Time of a block per k-block that its ring does not hold from the start: its load waits for a released stage."""
    sparse_us: float = 0.0
    """Time of a product per such k-block if, of three block slots per multiprocessor, its blocks take at most two: the
    next product's blocks then load at the same time, and the last of them start late."""
    occupancy_us: float = 0.0
    """Penalty where this kernel occupies every block slot, so that the next kernel's blocks cannot be co-resident; 0 at
    half occupancy."""
    hidden_tiles: int = 0
    """Tiles per multiprocessor whose reductions are hidden, as the ring keeps loading."""
    exposed_us: float = 0.0
    """Time of a product per tile beyond `hidden_tiles` and per block of a tile beyond the first."""
    small: "CostModel | None" = None
    """The model for small weights, of up to ``small_rings`` times what the rings of all multiprocessors hold."""
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
    """Return the cost model of a width; ``blockwise``: scales change along k."""
    if width_ == MOST_ROWS:
        return _limited_if_small(_FULL._replace(configs=_CONFIGS_64_BLOCKWISE if blockwise else _CONFIGS_64))
    if width_ == 32:
        return _limited_if_small(_ABOVE_16._replace(configs=_CONFIGS_32))
    a_stages = 24 if width_ == 8 else 16
    small = CostModel(_CONFIGS_16_SMALL, 0.01, a_stages, conflict=0.15, refill_us=0.3, sparse_us=0.15, occupancy_us=0.1)
    return CostModel(_CONFIGS_16, 0.04, 16, hidden_tiles=4, exposed_us=0.01, small=small, small_rings=2.0)


def _limited_if_small(model: CostModel) -> CostModel:
    """Add a model for small weights to one of more than 16 rows: limited prefetch and no multicast, as measured."""
    configs = tuple(c._replace(limit_prefetch=True) for c in model.configs if c.multicast_tiles == 1)
    return model._replace(small=model._replace(configs=configs, exposed_us=0.0), small_rings=LIMITED_RINGS)


def cost(n: int, k: int, model: CostModel, tile: TileConfig, config: DecodeConfig, target: Target) -> tuple[float, int]:
    """Return a product's microseconds (of memory or the busiest block, plus the reduction) and its number of blocks."""
    tiles, blocks = ceil_div(n, config.tile * config.multicast_tiles), config.cluster * config.clusters
    memory = n * k / WEIGHT_BYTES_A_US * (1 + model.conflict / config.split_k)
    k_block = config.m_warpgroups * config.ctas_per_sm * tile.k_block_us
    ring = WEIGHT_RING_BYTES / (config.ctas_per_sm * config.tile * BLOCK_K)
    refills = max(0.0, config.part(k) * tiles / config.clusters - ring)
    busiest = config.busiest_us(n, k, k_block, tile.tile_us) + model.refill_us * refills
    reduction = (model.reduce_us + model.reduce_warpgroup_us * (config.k_warpgroups - 1)) * (config.split_k - 1)
    exposed = max(0.0, tiles * config.ctas_per_sm / config.clusters - model.hidden_tiles)
    reduction += model.exposed_us * exposed * (config.split_k - 1)
    if config.ctas_per_sm > 2 and blocks <= 2 * target.multiprocessors:
        reduction += model.sparse_us * refills
    occupied = 2 * blocks / (config.ctas_per_sm * target.multiprocessors) - 1
    return round(max(memory, busiest) + reduction + model.occupancy_us * max(0.0, occupied), 3), blocks


@cache
def cheapest(n: int, k: int, model: CostModel, target: Target) -> DecodeConfig:
    """Return the config of least cost for a weight ``[n, k]``; of equal ones, that with the fewest blocks."""
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
