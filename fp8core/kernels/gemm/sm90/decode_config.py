"""Layouts of products of few rows on a Hopper GPU, and the shared memory and time that they take.

`decode_channels_config` and `decode_rows_config` choose among them.
"""

from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.problem import BLOCK
from fp8core.target import Target

MOST_ROWS: Final = 64
"""Rows of a that one launch takes."""
WIDTHS: Final = (8, 16, 32, 64)
"""The N sides of wgmma that kernels are compiled for: the rows of a, padded. (Its M side holds output channels.)"""
MORE_WIDTHS: Final = (96, 128)
"""Further N sides for a weight at any address: aligning it takes as long for few rows as for many."""
BLOCK_K: Final = BLOCK
"""Columns of k in a stage of a ring: a k-block."""
LEAST_STAGES: Final = 2
"""Least k-blocks of the weight in flight per warpgroup: with fewer the kernel is not compiled."""
MEASURED_MULTIPROCESSORS: Final = 132
"""Multiprocessors of the H200 on which all numbers about layouts were measured."""
CLUSTERS: Final = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
"""How many clusters of each size that H200 holds with one block per multiprocessor (as its driver counts them)."""


class DecodeConfig(NamedTuple):
    """The layout of a product: the constants that its kernel is compiled with, and its grid."""

    split_k: int
    """Blocks that share a tile; each takes a part of k."""
    clusters: int
    m_warpgroups: int
    k_warpgroups: int
    ctas_per_sm: int
    a_stages: int
    """k-blocks of a in flight."""
    prefetch_k_blocks: int = 0
    """k-blocks of the weight in flight until a has been requested; 0: as many as fit."""
    spare_bytes: int = 0
    """Shared memory per multiprocessor that is left free for the next kernel."""
    multicast_tiles: int = 1
    """Tiles of a cluster: its blocks with the same part of k multicast their loads of a, of eight or more rows each."""
    warpgroup_channels: int = 64
    """Channels of a tile per warpgroup: 64 on wgmma's M side, 64 to 128 on its N side."""
    rows_first: bool = False
    """Whether the rows of a are on wgmma's M side (sm90_decode_rows)."""

    phases: int = 0
    """Residues of channels, each with its own tensor map, for a weight at any address; 0: one map has all channels."""
    residues: int = 1
    """Residues that a tile has channels of, equally many of each: 1 or 2."""
    panels: int = 1
    """Panels of rows of a, for a weight at any address: each has blocks of its own, which read the whole weight."""
    ahead_bytes: int = 64 << 10
    """Bytes of the weight per multiprocessor that are prefetched into L2 when the ring is full and a has not arrived
    (experiments/2026-11-ahead-of-the-ring)."""
    keeps_result: bool = False
    """Whether stores ask L2 to keep the result, which the streaming weight would evict."""

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.split_k * self.multicast_tiles

    @property
    def tile(self) -> int:
        """Channels of a tile."""
        return self.warpgroup_channels * self.m_warpgroups

    @property
    def groups(self) -> int:
        """Groups of residues; each tile has one of them."""
        return max(1, self.phases) // self.residues

    @property
    def weight_columns(self) -> int:
        """Columns of k in a box of the weight: a k-block's, and 16 more if rows are aligned in registers."""
        return BLOCK_K + 16 * (self.phases > 0)

    @property
    def ahead_k_blocks(self) -> int:
        """k-blocks that a block prefetches into L2."""
        return self.ahead_bytes // (self.tile * BLOCK_K * self.ctas_per_sm)

    def weight_scales(self, scale_rows: int) -> int:
        """Return how many scales of ``scale_rows`` channels a tile has per k-block; across borders it has one more."""
        return ceil_div(self.tile * self.groups, scale_rows) if scale_rows > 1 else self.tile

    def part(self, k: int) -> int:
        """Return the k-blocks of a tile that the busiest block has."""
        return ceil_div(ceil_div(k, BLOCK_K), self.split_k)

    def turns(self, n: int) -> int:
        """Return how many tiles the busiest cluster makes, one after another."""
        return ceil_div(ceil_div(n, self.tile * self.multicast_tiles), self.clusters)

    def busiest_us(self, n: int, k: int, k_block_us: float, tile_us: float) -> float:
        """Return the microseconds of the busiest block, given those of a k-block and of a tile's epilogue."""
        return self.turns(n) * (self.part(k) * k_block_us + tile_us)

    def with_blocks(self, ctas_per_sm: int) -> "DecodeConfig":
        """Return the config with ``ctas_per_sm`` blocks per multiprocessor, and as many k-blocks of a in flight."""
        return self._replace(ctas_per_sm=ctas_per_sm, a_stages=self.a_stages * self.ctas_per_sm // ctas_per_sm)

    @property
    def own_units(self) -> int:
        """The most units of 8 channels that a block completes; sm90_decode_rows deals pairs if there are enough."""
        units = self.tile // 8
        dealt = 2 if self.rows_first and units >= 4 * self.split_k else 1
        return ceil_div(ceil_div(units, dealt), self.split_k) * dealt


def width(m: int) -> int:
    """Return the N side of wgmma that holds ``m`` rows."""
    return next(side for side in (*WIDTHS, *MORE_WIDTHS) if side >= m)


def clusters_at_once(target: Target) -> dict[int, int]:
    """Return how many clusters of each size a device holds at a time, with one block per multiprocessor."""
    return {blocks: count * target.multiprocessors // MEASURED_MULTIPROCESSORS for blocks, count in CLUSTERS.items()}


def without_multicast(config: DecodeConfig, n: int) -> DecodeConfig:
    """Return the config for ``n`` channels with one tile per cluster and the same order of sums."""
    return config._replace(
        multicast_tiles=1, clusters=min(config.clusters * config.multicast_tiles, ceil_div(n, config.tile))
    )


AHEAD_FROM: Final = 48e6
"""Bytes of a weight from which it is prefetched into L2: smaller ones, which the rings largely hold, gain nothing."""
PREFETCH_BYTES: Final = 40 << 10
"""Bytes of the weight in flight per multiprocessor until a has been requested: more would not arrive sooner."""
QUANTIZER_BYTES: Final = 2048
"""Shared memory of a block that quantizes: the 1,024 bytes that the system reserves, and its own."""
STATIC_BYTES: Final = 48 << 10
"""Static shared memory that a kernel may have."""
LARGE_BYTES: Final = 300e6
"""Bytes of a weight from which room for two such blocks, and twice the prefetch into L2, were faster."""


def limit_prefetch(config: DecodeConfig) -> DecodeConfig:
    """Return the config with a limited prefetch, which leaves bandwidth to the predecessor.

    Blocks that are co-resident with their predecessor's have time for that. A block that has a multiprocessor to itself
    starts when its predecessor has ended, and is slower with a limited prefetch, except in linear layers.
    """
    return config._replace(prefetch_k_blocks=ceil_div(PREFETCH_BYTES, config.tile * BLOCK_K * config.ctas_per_sm))


def without_prefetch(config: DecodeConfig, target: Target) -> DecodeConfig:
    """Return the config, with the same order of sums, for a weight that must not be read before the predecessor ends.

    Being co-resident with the predecessor is useless then: a multiprocessor gets only as many blocks, but at least two,
    as are needed to place all of them.
    """
    ctas_per_sm = max(2, ceil_div(config.clusters * config.panels, clusters_at_once(target)[config.cluster]))
    if ctas_per_sm >= config.ctas_per_sm:
        return config
    return config.with_blocks(ctas_per_sm)


def linear_config(config: DecodeConfig, weight_bytes: int = 0) -> DecodeConfig:
    """Return the config for linear layers, in which quantizations and products alternate.

    If a quantization finds room beside its predecessor, it can start as soon as that ends. Both it and the product get
    their rows early if the loads of a full ring are not queued in memory ahead of them.
    """
    config = limit_prefetch(config)
    if weight_bytes > LARGE_BYTES:
        return config._replace(spare_bytes=2 * QUANTIZER_BYTES, ahead_bytes=2 * config.ahead_bytes)
    return config._replace(spare_bytes=QUANTIZER_BYTES)


def dynamic_bytes(config: DecodeConfig, side: int, scale_rows: int, stages_: int, target: Target) -> int:
    """Return the dynamic shared memory that a block asks for: its whole share of a multiprocessor's.

    So it is the same for every cluster that the compiled kernel serves.
    """
    # The system reserves 1,024 bytes per block; the device's figure excludes those of the first.
    share = (target.shared_bytes - config.spare_bytes) // config.ctas_per_sm - 1024 * (config.ctas_per_sm - 1)
    return share - fixed_bytes(config, side, scale_rows, stages_)


def ring_bytes(config: DecodeConfig, side: int, stages_: int) -> int:
    """Return the dynamic shared memory that a block needs: both rings, the reduction buffer, 1,024 bytes to align."""
    rings = stages_ * config.tile * config.weight_columns + config.a_stages * side * BLOCK_K
    return rings + (config.split_k * config.k_warpgroups - 1) * config.own_units * 8 * side * 4 + 1024


def fixed_bytes(config: DecodeConfig, side: int, scale_rows: int, stages_: int) -> int:
    """Return the static shared memory of a block, with 64 bytes for alignment.

    ``scale_rows`` channels share a scale of the weight; 0: scales are per row or tensor.
    """
    barriers = 8 * (2 * stages_ + 2 * config.a_stages + 3)
    scales = 4 * config.a_stages * (side + config.weight_scales(scale_rows) + 1) if scale_rows else 0
    of_channels = 16 * config.tile if config.rows_first else 0
    return barriers + scales + of_channels + 4 * side + 64


def holds(config: DecodeConfig, side: int, scale_rows: int, stages_: int, target: Target) -> bool:
    """Return whether so many k-blocks of the weight fit into a block's ring."""
    return ring_bytes(config, side, stages_) <= dynamic_bytes(config, side, scale_rows, stages_, target)


def stages(config: DecodeConfig, side: int, scale_rows: int, target: Target) -> int:
    """Return how many k-blocks of the weight fit into a block's ring: a multiple of ``k_warpgroups``."""
    step = config.k_warpgroups
    count = step
    while holds(config, side, scale_rows, count + step, target):
        count += step
    return count
