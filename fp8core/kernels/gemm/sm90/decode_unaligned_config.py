"""The layouts of `sm90_decode_unaligned` in panels of up to 64 rows, and their times.

What differs from `sm90_decode`: a tile has channels of one residue or two, of which the last one may be empty; the
results of a residue are stored up to 16 elements apart; an unaligned a is aligned by each block, or copied first; and
the rows of a may be in several panels, each with blocks of its own, for which a weight has to be so small that there
are multiprocessors for all of them. Up to 256 rows may be in panels of up to 128, too (`decode_wide_config`).
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.overlap import overlapped_us
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
from fp8core.problem import ScaledMm

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
    """Time per million bytes of results, stored or added to, multiplied by their spread (`result_spread`)."""
    late_us: float
    """Time to load what is added to results behind the products, where threads have no registers for it before."""
    clear_us: float
    """Time of the launch that clears amax before the product, unless a copy of a does."""
    panel: float
    """Time to read the weight again for each further panel of rows, as a multiple of `memory`."""


COSTS: Final = {
    8: Costs(
        *(0.837, 0.953, {ONE: 0.205, ALONG_K: 0.136, ALONG_N: 0.13}, {ONE: 0.125, ALONG_K: 0.28, ALONG_N: 0.199}),
        *(0.034, 0.334, 0.469, 0.045, 0.466, 1.778, 0.249, 0.129, 0.398, 1.118),
    ),
    16: Costs(
        *(0.929, 0.967, {ONE: 0.237, ALONG_K: 0.161, ALONG_N: 0.15}, {ONE: 0.218, ALONG_K: 0.421, ALONG_N: 0.359}),
        *(0.02, 0.358, 0.414, 0.07, 0.451, 1.481, 0.262, 0.072, 0.396, 1.212),
    ),
    32: Costs(
        *(0.807, 1.027, {ONE: 0.242, ALONG_K: 0.169, ALONG_N: 0.152}, {ONE: 0.515, ALONG_K: 0.804, ALONG_N: 0.847}),
        *(0.021, 0.478, 0.166, 0.21, 0.635, 1.6, 0.331, 0.014, 0.392, 1.247),
    ),
    64: Costs(
        *(1.239, 1.241),
        {ONE: 0.256, ALONG_K: 0.182, ALONG_N: 0.154, MULTICAST: 0.154},
        {ONE: 0.76, ALONG_K: 1.143, ALONG_N: 1.232, MULTICAST: 1.165},
        *(0.052, 0.477, 0.0, 0.216, 0.741, 1.79, 0.235, 0.092, 0.123, 1.423),
    ),
}
"""By the N side."""
MOST_BYTES: Final = 16e6
"""Of the weight, times panels of rows, where several are weighed."""
A_STAGES: Final = {8: 24, 16: 16, 32: 12, 64: 12}
"""k-blocks of a in flight per multiprocessor, by the N side."""
A_STAGES_ALONG_N: Final = 8
"""The same with two warpgroups of different channels."""


def us(p: ScaledMm, config: DecodeConfig, costs: Costs | None = None) -> float:
    """Return the microseconds of a product in a layout, by default by `COSTS`."""
    moved, p = p.m * p.n * ITEMSIZE[p.out] * (2 if p.beta else 1), panel_of(p, config.panels)
    costs, tile = costs or COSTS[width(p.m)], warpgroups(config)
    if tile not in costs.k_block_us:  # clusters of tiles that only sm90_decode has
        tile = (*tile[:2], 1)
    blocks, multiprocessors = config.cluster * config.clusters * config.panels, p.target.multiprocessors
    n = channels(p.n, config)
    beside = min(config.ctas_per_sm, ceil_div(blocks, multiprocessors)) - 1
    k_block = (costs.k_block_us[tile] + costs.blockwise_us * is_along_k(p)) * (1 + costs.beside * beside)
    busiest = config.busiest_us(n, p.k, config.m_warpgroups * k_block, costs.tile_us[tile])
    loaded = n * ceil_div(p.k, BLOCK_K) * config.weight_columns * (1 + costs.panel * (config.panels - 1))
    found = costs.start_us + overlapped_us(OVERLAP, busiest, costs.memory * loaded / WEIGHT_BYTES_A_US)
    found += costs.reduce_us * (config.split_k - 1)
    found += costs.result_us * moved * result_spread(p, config.residues) / 1e6
    found += costs.late_us * _adds_late(p, config)
    found += costs.occupied_us * max(0.0, 2 * blocks / (config.ctas_per_sm * multiprocessors) - 1)
    aligns = a_is_unaligned(p) and aligns_a(p, config)
    if a_is_unaligned(p) and not aligns:
        return found + costs.copy_us
    batches = ceil_div(words_of(p, config), most_words(p, config)) if aligns else 0
    return found + costs.batch_us * batches + costs.clear_us * p.amax


def warpgroups(config: DecodeConfig) -> Warpgroups:
    """Return how the tiles of a layout are divided."""
    return config.m_warpgroups, config.k_warpgroups, config.multicast_tiles


def _adds_late(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether what is added to results is loaded behind the products (ADDENDS_EARLY of the kernel)."""
    return p.beta != 0 and (config.ctas_per_sm > 2 or width(p.m) > (8 if is_along_k(p) else 16))


def channels(n: int, config: DecodeConfig) -> int:
    """Return ``n`` rounded up to whole tiles for each group of residues, and to whole clusters."""
    return pad_channels(n, config.groups, config.tile * config.multicast_tiles)


@lru_cache(maxsize=256)
def cheapest(p: ScaledMm) -> DecodeConfig | None:
    """Return the config of least cost; of equal ones, the first. More than 64 rows of a large weight have none."""
    p = in_groups(p)
    return min(candidates(p), key=lambda config: us(p, config), default=None)


def panel_of(p: ScaledMm, panels: int) -> ScaledMm:
    """Return the product of the first one of so many panels of rows: of several, all but the last have N rows."""
    return p if panels == 1 else p._replace(m=width(ceil_div(p.m, panels)))


def candidates(p: ScaledMm) -> Iterator[DecodeConfig]:
    """Yield the layouts of a product that threads have the registers for.

    Those with several panels place all blocks at once.
    """
    for side in reversed(COSTS):
        panels = ceil_div(p.m, side)
        if p.n * p.k * panels <= MOST_BYTES if panels > 1 else side == width(p.m):
            yield from _in_panels(p, panels)


def _in_panels(p: ScaledMm, panels: int) -> Iterator[DecodeConfig]:
    p = panel_of(p, panels)
    phases, side = phases_of(p.ldb), width(p.m)
    for residues in (2, 1) if phases > 1 else (1,):
        for m_warpgroups, k_warpgroups, multicast_tiles in COSTS[side].k_block_us:
            if panels > 1 and multicast_tiles > 1:
                continue
            a_stages = A_STAGES_ALONG_N if m_warpgroups > 1 else A_STAGES[side]
            for ctas_per_sm in (1, 2, 3) if m_warpgroups == k_warpgroups == 1 else (1,):
                for cluster in POWERS:
                    split_k = cluster // multicast_tiles
                    config = DecodeConfig(
                        *(split_k, 1, m_warpgroups, k_warpgroups, ctas_per_sm, a_stages // ctas_per_sm),
                        multicast_tiles=multicast_tiles,
                        phases=phases,
                        residues=residues,
                        panels=panels,
                    )
                    most = clusters_at_once(p.target)[cluster] * ctas_per_sm // panels
                    if not most or not 1 <= split_k <= ceil_div(p.k, BLOCK_K) or not _has_registers(p, config):
                        continue
                    tiles = channels(p.n, config) // (config.tile * multicast_tiles)
                    if not tiles or (panels > 1 and tiles > most):
                        continue
                    config = config._replace(clusters=min(tiles, most))
                    yield config if multicast_tiles > 1 else limit_prefetch(config)


def _has_registers(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether threads have registers: compiled otherwise, most layouts keep numbers in local memory.

    Three blocks of up to 8 rows with scales of channels have them, but are slower.
    """
    side, of_channels = width(p.m), p.scale_b == "group"
    if side == MOST_ROWS:
        most = 1 if is_along_k(p) else 2
    else:
        most = 3 if not of_channels and (side == 8 or (side == 16 and not p.beta)) else 2
    if config.ctas_per_sm > most or lacks_registers(p, config):
        return False
    if side == 32:
        return not (of_channels and p.amax and config.ctas_per_sm == config.residues == 2)
    return not (side == MOST_ROWS and of_channels and config.m_warpgroups * config.k_warpgroups > 1)
