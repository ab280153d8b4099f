"""Which blocks of `sm90_decode_unaligned` align rows of a themselves, and how many words a thread loads at a time.

Such a block aligns the part of a that it multiplies (``loose_rows.cuh``). That saves the launch of a copy. But blocks
with the same part of k each do it, and a thread has registers for few words in flight. Most layouts are chosen for what
is multiplied; with 33 to 64 rows `with_one_warpgroup` chooses one for aligning a.
"""

from typing import Final

from fp8core.kernels.encodings import ceil_div, round_up
from fp8core.kernels.gemm.realigned import ALIGNMENT
from fp8core.kernels.gemm.requirements import OCP
from fp8core.kernels.gemm.scales import in_groups, is_along_k
from fp8core.kernels.gemm.sm90.decode import SCALE_ROWS
from fp8core.kernels.gemm.sm90.decode_config import (
    BLOCK_K,
    MOST_ROWS,
    DecodeConfig,
    clusters_at_once,
    dynamic_bytes,
    limit_prefetch,
    ring_bytes,
    width,
)
from fp8core.kernels.gemm.sm90.residues import CHANNELS, pad_channels
from fp8core.problem import ScaledMm

LOOSE_BATCHES: Final = 2
"""Most batches of loads of a that the threads of an aligning block wait for: a copy of a takes about as long."""
MOST_WORDS: Final = 5
"""Most words of a in flight per thread."""
QUARTER: Final = 16384
"""Registers of each of the four parts of a multiprocessor."""
MOST_REGISTERS: Final = 255
"""Of a thread."""
WORD_REGISTERS: Final = 12
"""Registers of a thread per word of a in flight."""
OTHER_REGISTERS: Final = {
    (8, False): 72,
    (8, True): 92,
    (16, False): 110,
    (16, True): 104,
    (32, False): 118,
    (32, True): 112,
    (64, False): 140,
    (64, True): 140,
}
"""Other registers of an aligning thread, by width and whether scales change along k, as ptxas allocates them."""
SPLITS: Final = (1, 2, 4, 8)
"""Into how many parts k is split: the sizes of clusters of one tile."""
LEAST_STAGES: Final = 2
"""Least k-blocks of the weight in flight per warpgroup: with fewer the kernel is not compiled."""
TWO_RESIDUES: Final = 12
"""Further registers of a thread if a tile has two residues."""


def a_is_unaligned(p: ScaledMm) -> bool:
    """Return whether TMA cannot load a: not all of its rows begin at multiples of 16 bytes."""
    return bool(p.lda % ALIGNMENT) or max(p.alignment, p.codes_alignment) < ALIGNMENT


def aligns_a(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether each block aligns its own part of a: if its threads have few words of it each."""
    if is_along_k(p) and width(p.m) == MOST_ROWS:
        return aligns_at_once(p, config)
    along_k = 32 if config.ctas_per_sm == 1 else 16
    room = width(p.m) <= (along_k if is_along_k(p) else MOST_ROWS)  # by registers
    return room and has_few_words(p, config) and holds_a(p, config) and not pair_spills(p, config)


def with_all_of_a(config: DecodeConfig, k: int) -> DecodeConfig:
    """Return the config with a ring that holds all k-blocks of a that a block multiplies, as it aligns them once."""
    return config._replace(a_stages=round_up(config.part(k), config.k_warpgroups))


def holds_a(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether a block's shared memory holds its part of a beside enough k-blocks of the weight.

    With one row or two of a long k it does not, though threads have few words of a.
    """
    own, side, stages = with_all_of_a(config, p.k), width(p.m), LEAST_STAGES * config.k_warpgroups
    scale_rows = SCALE_ROWS.get(in_groups(p).scale_b, 0)
    return ring_bytes(own, side, stages) <= dynamic_bytes(own, side, scale_rows, stages, p.target)


def has_few_words(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether threads can load their words of a in as many batches as they may wait for."""
    return words_of(p, config) <= LOOSE_BATCHES * most_words(p, config)


def aligns_at_once(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether blocks of one warpgroup, each with a multiprocessor, load 33 to 64 rows of a in one batch."""
    alone = config.m_warpgroups == config.k_warpgroups == config.ctas_per_sm == config.residues == 1
    return width(p.m) == MOST_ROWS and alone and words_of(p, config) <= MOST_WORDS


def aligns_better(p: ScaledMm, one: DecodeConfig, two: DecodeConfig) -> bool:
    """Return whether blocks had better align a in a layout of ``one`` residue a tile, not of ``two``.

    With up to 32 rows they had if they cannot with two residues, for which a would be copied.
    """
    return aligns_at_once(p, one) if p.m > 32 else aligns_a(p, one) and not aligns_a(p, two)


def pair_spills(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether two warpgroups for alternate k-blocks, which could align a otherwise, spill registers.

    They do with 33 to 64 rows and an FP8 result that has a bias and amax. With scales along k they align no such rows.
    """
    ending = p.out in OCP and p.bias != "" and p.amax and not is_along_k(p)
    return ending and width(p.m) == MOST_ROWS and config.k_warpgroups > 1 and has_few_words(p, config)


def with_one_warpgroup(p: ScaledMm, config: DecodeConfig) -> DecodeConfig:
    """Return the layout of 33 to 64 rows in which blocks of one warpgroup align a, if one is worth it, else ``config``.

    It is if blocks have a multiprocessor each and load a in one batch, or in two in place of two warpgroups that spill.
    k is split no further than that takes.
    """
    most = MOST_WORDS * (LOOSE_BATCHES if pair_spills(p, config) else 1)
    tiles = pad_channels(p.n, config.groups, CHANNELS) // CHANNELS
    for split_k in SPLITS:
        one = config._replace(split_k=split_k, clusters=tiles, m_warpgroups=1, k_warpgroups=1)
        one = one._replace(ctas_per_sm=1, multicast_tiles=1, a_stages=one.part(p.k))
        placed = split_k <= ceil_div(p.k, BLOCK_K) and tiles <= clusters_at_once(p.target)[split_k]
        if placed and words_of(p, one) <= most:
            return limit_prefetch(one)
    return config


def words_of(p: ScaledMm, config: DecodeConfig) -> int:
    """Return how many 16-byte words of a each thread aligns at most."""
    threads = 128 * config.m_warpgroups * config.k_warpgroups
    return ceil_div(p.m * config.part(p.k) * (BLOCK_K // ALIGNMENT), threads)


def most_words(p: ScaledMm, config: DecodeConfig) -> int:
    """Return how many words of a each thread can load at a time without spills."""
    blockwise = is_along_k(p)
    warps = 4 * config.m_warpgroups * config.k_warpgroups + 2 + blockwise
    of_quarter = ceil_div(warps * config.ctas_per_sm, 4)  # the warps that share a quarter of the registers
    others = OTHER_REGISTERS[width(p.m), blockwise] + TWO_RESIDUES * (config.residues - 1)
    left = min(MOST_REGISTERS, QUARTER // (32 * of_quarter)) - others
    return max(1, min(MOST_WORDS, left // WORD_REGISTERS))


def loose_batch(p: ScaledMm, config: DecodeConfig) -> int:
    """Return how many words of a each thread loads at a time: in as few batches as registers allow."""
    words = words_of(p, config)
    return ceil_div(words, ceil_div(words, most_words(p, config)))
