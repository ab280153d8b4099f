"""The layout and the time of `sm90_decode_unaligned` for up to 64 rows: the config of least cost.

What differs from `sm90_decode`: a tile has channels of one residue or two, of which the last one may be empty; the
results of a residue are stored up to 16 elements apart; and an unaligned a is aligned by each block, or copied first.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.overlap import overlapped_us
from fp8core.kernels.gemm.requirements import OCP
from fp8core.kernels.gemm.scales import in_groups, is_along_k
from fp8core.kernels.gemm.sm90.decode_channels_config import POWERS, WEIGHT_BYTES_A_US
from fp8core.kernels.gemm.sm90.decode_config import (
    BLOCK_K,
    MOST_ROWS,
    DecodeConfig,
    clusters_at_once,
    limit_prefetch,
    width,
)
from fp8core.kernels.gemm.sm90.loose_rows import a_is_unaligned, aligns_a, most_words, words_of
from fp8core.kernels.gemm.sm90.residues import lacks_registers, pad_channels, phases_of, result_spread
from fp8core.problem import ITEMSIZE, ScaledMm

Warpgroups = tuple[int, int, int]
"""The m_warpgroups, k_warpgroups and multicast_tiles of a `DecodeConfig`."""
ONE: Final = (1, 1, 1)
ALONG_K: Final = (1, 2, 1)
ALONG_N: Final = (2, 1, 1)
MULTICAST: Final = (2, 1, 2)
OVERLAP: Final = 4.0
"""Exponent of the norm that combines the times of the memory and of the busiest block (`overlapped_us`)."""


class Costs(NamedTuple):
    """Microseconds for an N side of wgmma on an H200; `python -m bench.unaligned_layouts --fit` finds them."""

    start_us: float
    memory: float
    """Time to read the weight, as a multiple of that at `WEIGHT_BYTES_A_US`."""
    k_block_us: dict[Warpgroups, float]
    """Time of a block that has a multiprocessor to itself, per 64 channels of a k-block."""
    tile_us: dict[Warpgroups, float]
    """Time of a block per tile, beside its k-blocks."""
    blockwise_us: float
    """Addition to `k_block_us` if scales change along k."""
    beside: float
    """Addition to `k_block_us`, as a part of it, for each further block on the same multiprocessor."""
    occupied_us: float
    """Time of a product whose blocks leave no room for the next one's; 0 if they leave half."""
    reduce_us: float
    """Time of a product per block of a tile beyond the first."""
    batch_us: float
    """Time of a batch of words of a that the threads of a block align."""
    copy_us: float
    """Time of the launch that aligns a before the product."""
    result_us: float
    """Time per million bytes of the result, multiplied by the spread of its stores (`result_spread`)."""


COSTS: Final = {
    8: Costs(
        *(0.456, 0.971, {ONE: 0.184, ALONG_K: 0.122, ALONG_N: 0.12}, {ONE: 0.289, ALONG_K: 0.444, ALONG_N: 0.354}),
        *(0.042, 0.385, 0.393, 0.049, 0.733, 2.278, 0.231),
    ),
    16: Costs(
        *(0.875, 0.981, {ONE: 0.227, ALONG_K: 0.15, ALONG_N: 0.137}, {ONE: 0.112, ALONG_K: 0.303, ALONG_N: 0.246}),
        *(0.028, 0.345, 0.61, 0.06, 0.559, 1.53, 0.302),
    ),
    32: Costs(
        *(0.534, 1.059, {ONE: 0.234, ALONG_K: 0.157, ALONG_N: 0.148}, {ONE: 0.608, ALONG_K: 1.025, ALONG_N: 0.964}),
        *(0.028, 0.545, 0.229, 0.127, 0.804, 1.821, 0.274),
    ),
    64: Costs(
        *(1.333, 1.26),
        {ONE: 0.264, ALONG_K: 0.189, ALONG_N: 0.164, MULTICAST: 0.157},
        {ONE: 0.746, ALONG_K: 1.173, ALONG_N: 1.225, MULTICAST: 1.22},
        *(0.053, 0.58, 0.13, 0.158, 0.581, 1.463, 0.227),
    ),
}
"""By the N side."""
A_STAGES: Final = {8: 24, 16: 16, 32: 12, 64: 12}
"""k-blocks of a in flight per multiprocessor, by the N side."""
A_STAGES_ALONG_N: Final = 8
"""The same with two warpgroups of different channels."""


def us(p: ScaledMm, config: DecodeConfig, costs: Costs | None = None) -> float:
    """Return the microseconds of a product in a layout, by default by `COSTS`."""
    costs, tile = costs or COSTS[width(p.m)], warpgroups(config)
    blocks, multiprocessors = config.cluster * config.clusters, p.target.multiprocessors
    n = channels(p.n, config)
    beside = min(config.ctas_per_sm, ceil_div(blocks, multiprocessors)) - 1
    k_block = (costs.k_block_us[tile] + costs.blockwise_us * is_along_k(p)) * (1 + costs.beside * beside)
    busiest = config.busiest_us(n, p.k, config.m_warpgroups * k_block, costs.tile_us[tile])
    loaded = n * ceil_div(p.k, BLOCK_K) * config.weight_columns
    found = costs.start_us + overlapped_us(OVERLAP, busiest, costs.memory * loaded / WEIGHT_BYTES_A_US)
    found += costs.reduce_us * (config.split_k - 1)
    found += costs.result_us * p.m * p.n * ITEMSIZE[p.out] * result_spread(p, config.residues) / 1e6
    found += costs.occupied_us * max(0.0, 2 * blocks / (config.ctas_per_sm * multiprocessors) - 1)
    if not a_is_unaligned(p):
        return found
    if aligns_a(p, config):
        return found + costs.batch_us * ceil_div(words_of(p, config), most_words(p, config))
    return found + costs.copy_us


def warpgroups(config: DecodeConfig) -> Warpgroups:
    """Return how the tiles of a layout are divided."""
    return config.m_warpgroups, config.k_warpgroups, config.multicast_tiles


def channels(n: int, config: DecodeConfig) -> int:
    """Return ``n`` rounded up to whole tiles for each group of residues, and to whole clusters."""
    return pad_channels(n, config.groups, config.tile * config.multicast_tiles)


def cheapest(p: ScaledMm) -> DecodeConfig:
    """Return the config of least cost; of equal ones, the first."""
    p = in_groups(p)
    return min(candidates(p), key=lambda config: us(p, config))


def candidates(p: ScaledMm) -> Iterator[DecodeConfig]:
    """Yield the layouts of a product that threads have the registers for."""
    phases, side = phases_of(p.ldb), width(p.m)
    for residues in (2, 1) if phases > 1 else (1,):
        for m_warpgroups, k_warpgroups, multicast_tiles in COSTS[side].k_block_us:
            a_stages = A_STAGES_ALONG_N if m_warpgroups > 1 else A_STAGES[side]
            for ctas_per_sm in (1, 2, 3) if m_warpgroups == k_warpgroups == 1 else (1,):
                for cluster in POWERS:
                    split_k = cluster // multicast_tiles
                    config = DecodeConfig(
                        *(split_k, 1, m_warpgroups, k_warpgroups, ctas_per_sm, a_stages // ctas_per_sm),
                        multicast_tiles=multicast_tiles,
                        phases=phases,
                        residues=residues,
                    )
                    most = clusters_at_once(p.target)[cluster] * ctas_per_sm
                    if not most or not 1 <= split_k <= ceil_div(p.k, BLOCK_K) or not _has_registers(p, config):
                        continue
                    tiles = channels(p.n, config) // (config.tile * multicast_tiles)
                    config = config._replace(clusters=min(tiles, most))
                    yield config if multicast_tiles > 1 else limit_prefetch(config)


def _has_registers(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether threads have registers: compiled otherwise, most layouts keep numbers in local memory."""
    side, of_channels = width(p.m), p.scale_b == "group"
    if side == MOST_ROWS:
        most = 1 if is_along_k(p) else 2
    elif side == 16 and not of_channels and not p.beta:
        most = 3
    else:
        most = 3 if side == 8 else 2
    if config.ctas_per_sm > most or lacks_registers(p, config):
        return False
    if side == 32:
        return not (of_channels and p.amax and config.ctas_per_sm == config.residues == 2)
    if side == MOST_ROWS and of_channels and config.m_warpgroups * config.k_warpgroups > 1:
        return config.multicast_tiles == 1 and not (p.out in OCP and p.bias != "")
    return True
