"""The residues of a weight's rows at any address, and how many of them a tile of `sm90_decode_unaligned` has.

Tiles of two residues (``cuda_src/gemm/sm90/phases.cuh``) fill up where those of one do not, as fewer tiles are needed.
And their neighbouring results are stored together. But two boxes of half the rows fill a stage, and threads align rows
at two offsets, which costs up to 5 % where nothing is saved.
"""

from math import gcd
from typing import Final

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.realigned import ALIGNMENT
from fp8core.kernels.gemm.requirements import OCP
from fp8core.kernels.gemm.scales import in_groups, is_along_k
from fp8core.kernels.gemm.sm90.decode_config import MOST_ROWS, DecodeConfig, width
from fp8core.kernels.gemm.sm90.loose_rows import a_is_unaligned, has_few_words
from fp8core.problem import ScaledMm

CHANNELS: Final = 64
"""Of the smallest tiles."""
SECTOR: Final = 32
"""Bytes that the memory stores together."""


def phases_of(stride: int) -> int:
    """Return the period, in rows, of the rows' offsets from multiples of 16 bytes."""
    return ALIGNMENT // gcd(ALIGNMENT, stride)


def pad_channels(n: int, groups: int, channels: int) -> int:
    """Return ``n`` rounded up to whole tiles of ``channels`` channels for each group of residues."""
    return ceil_div(n, groups * channels) * groups * channels


def result_spread(p: ScaledMm, residues: int) -> int:
    """Return over how many times their bytes, measured in sectors, the results that a warp stores together spread.

    They are of one residue, so as many channels apart as there are residues. With two residues in a tile the threads
    exchange results and store pairs of neighbours, twice as far apart. Where one residue's results have a sector each,
    pairs take half as many; where several share a sector, as many sectors are written either way.
    """
    count = phases_of(p.ldb)
    return count // residues if count * ITEMSIZE[p.out] >= SECTOR else count


def residues_of(p: ScaledMm) -> int:
    """Return how many residues a tile has: two if so there are fewer tiles, or fewer sectors to store."""
    count = phases_of(p.ldb)
    if count == 1:
        return 1
    fewer_tiles = pad_channels(p.n, count // 2, CHANNELS) < pad_channels(p.n, count, CHANNELS)
    return 2 if fewer_tiles or result_spread(p, 2) < result_spread(p, 1) else 1


def lacks_registers(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether threads lack registers for a tile's two residues: they need up to 12 more than for one.

    Compiled with two, most such layouts spill: more than 96 rows with scales of each channel along k, three blocks a
    multiprocessor with 9 to 16 rows or with the bias of an FP8 result, and two warpgroups with 33 to 64 rows that align
    a.
    """
    if config.residues == 1:
        return False
    # With batch_invariant the answer must be the same for every m and wherever a begins: it orders the sums.
    side = MOST_ROWS if p.batch_invariant else width(p.m)
    if side == MOST_ROWS and config.m_warpgroups * config.k_warpgroups > 1:
        aligns = a_is_unaligned(p) and has_few_words(p, config._replace(residues=1))
        return p.batch_invariant or (not is_along_k(p) and aligns)
    if side > MOST_ROWS:
        return side == 128 and in_groups(p).scale_b == "group"
    biased_codes = p.out in OCP and p.bias != "" and not is_along_k(p)
    return config.ctas_per_sm > 2 and (side == 16 or (side == 8 and biased_codes))
