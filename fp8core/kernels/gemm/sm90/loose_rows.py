"""Which blocks of `sm90_decode_unaligned` align rows of a themselves, and how many words a thread loads at a time.

Such a block aligns the part of a that it multiplies (``loose_rows.cuh``). That saves the launch of a copy. But blocks
with the same part of k each do it, and a thread has registers for few words in flight.
"""

from typing import Final

from fp8core.kernels.encodings import ceil_div, round_up
from fp8core.kernels.gemm.realigned import ALIGNMENT
from fp8core.kernels.gemm.requirements import OCP
from fp8core.kernels.gemm.scales import in_groups, is_along_k
from fp8core.kernels.gemm.sm90.decode import SCALE_ROWS
from fp8core.kernels.gemm.sm90.decode_config import (
    BLOCK_K,
    LEAST_STAGES,
    MOST_ROWS,
    STATIC_BYTES,
    DecodeConfig,
    fixed_bytes,
    holds,
    width,
    without_multicast,
)
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
BARRIER_BYTES: Final = 1024
"""More than the barriers of all further stages that fit take."""
TWO_RESIDUES: Final = 12
"""Further registers of a thread if a tile has two residues."""


def a_is_unaligned(p: ScaledMm) -> bool:
    """Return whether TMA cannot load a: not all of its rows begin at multiples of 16 bytes."""
    return bool(p.lda % ALIGNMENT) or max(p.alignment, p.codes_alignment) < ALIGNMENT


def aligns_a(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether each block aligns its own part of a: if its threads have few words of it each."""
    if is_along_k(p) and width(p.m) == MOST_ROWS:
        alone = config.m_warpgroups == config.k_warpgroups == config.ctas_per_sm == config.residues == 1
        return alone and words_of(p, config) <= MOST_WORDS  # one batch
    along_k = 32 if config.ctas_per_sm == config.m_warpgroups == config.k_warpgroups == 1 else 16
    room = width(p.m) <= (along_k if is_along_k(p) else MOST_ROWS)  # by registers
    return room and has_few_words(p, config) and holds_a(p, config) and not pair_spills(p, config)


def holds_a(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether a block's shared memory holds its part of a beside enough k-blocks of the weight.

    With one row or two of a long k it does not, though threads have few words of a.
    """
    own, side, scale_rows = aligned_config(p, config), width(p.m), SCALE_ROWS.get(in_groups(p).scale_b, 0)
    fewest = LEAST_STAGES * config.k_warpgroups
    static = fixed_bytes(own, side, scale_rows, fewest) + BARRIER_BYTES
    return static <= STATIC_BYTES and holds(own, side, scale_rows, fewest, p.target)


def has_few_words(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether threads can load their words of a in as many batches as they may wait for."""
    return words_of(p, config) <= LOOSE_BATCHES * most_words(p, config)


def pair_spills(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether two warpgroups for alternate k-blocks that align a spill registers.

    They do with 33 to 64 rows, which they align without scales along k alone, and an FP8 result with a bias and amax.
    """
    ending = p.out in OCP and p.bias != "" and p.amax
    return ending and width(p.m) == MOST_ROWS and config.k_warpgroups > 1


def aligned_config(p: ScaledMm, config: DecodeConfig) -> DecodeConfig:
    """Return the layout in which blocks align a: each keeps all of its part of a in shared memory."""
    config = without_multicast(config, p.n) if config.multicast_tiles > 1 else config
    return config._replace(a_stages=round_up(config.part(p.k), config.k_warpgroups))


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
