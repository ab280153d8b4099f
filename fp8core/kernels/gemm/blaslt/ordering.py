"""The estimated time of a cuBLASLt algorithm on Hopper, from its tile, its cluster and its workspace.

The constants are fitted by `python -m bench.fit_estimates` to products of `bench/choice_cases.py`, on an H200, and
judged on others (tests/benchmarks/test_choice.py; experiments/2026-11-choice).
"""

import ctypes
import math
from functools import cache
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.blaslt.library import Library
from fp8core.kernels.gemm.overlap import overlapped_us
from fp8core.problem import BLOCK

MEASURED_VERSIONS: Final = range(130100, 130200)
"""Versions of cuBLASLt whose algorithms were timed."""
LAUNCH_US: Final = 3.315
"""Time of a launch and of filling the pipeline, if weights come from memory."""
PRODUCT_US: Final = 1.565e-5
"""Time of a multiprocessor per result of a tile and k-block of 128."""
BLOCKWISE: Final = 1.023
"""Factor on that with scales that change along k."""
COOPERATIVE: Final = 1.065
"""Factor on a k-block of a tile that all consumers of a block share: they multiply nothing during its epilogue."""
LOAD_US: Final = 0.0007954
"""Time of a multiprocessor per row of 128 codes that it loads while all of them load. Blocks of a cluster share the
loads of rows that they have in common."""
DELIVERY_US: Final = 0.0005902
"""Addition per row that arrives in a multiprocessor's shared memory, whichever block loads it."""
UNALIGNED: Final = 0.4515
"""Fraction by which loads take longer if rows do not begin at multiples of `SECTOR` bytes."""
SECTORS: Final = 0.1708
"""The same if they do, but not at multiples of 128."""
SECTOR: Final = 32
"""Bytes that L2 reads together."""
ZEROS: Final = 2.303
"""Each row of a tile beyond those of a, which TMA fills with zeros, counts as so many further rows."""
SHARED_US: Final = 0.00029
"""Time of a multiprocessor per row of 128 codes that `wgmma` reads from shared memory, or that is written there."""
K_BLOCK_US: Final = 0.02011
"""Time per k-block, whatever the tile."""
ROUND_US: Final = 0.2345
"""Time of a tile's epilogue, whatever its size."""
RESULT_US: Final = 6.284e-5
VECTOR_RESULT_US: Final = 1.153e-5
BLOCKWISE_RESULT_US: Final = 1.667e-5
"""Time of a tile's epilogue per result, and additions to it with scales per row and channel and with scales along k."""
BESIDE: Final = 2.631
"""Factor on a tile's epilogue while another tile is multiplied."""
HEAT: Final = 0.4369
BLOCKWISE_HEAT: Final = 0.5483
"""Fraction by which k-blocks take longer in a product of many rounds, as the clock falls; with few rounds, less."""
HOT_US: Final = 47.72
"""Time of k-blocks after which half of that fraction applies."""
WHOLE_ROUNDS: Final = 1.082
"""Share of the time that grows with whole rounds; the rest grows with tiles."""
BYTES_A_US: Final = 4.149e6
"""Memory bandwidth, in bytes per microsecond."""
OVERLAP: Final = 4.402
"""Exponent of the norm that combines the overlapping times (`overlapped_us`) of the memory, of the loads and of the
multiprocessors."""
COUNTER_US: Final = 2.704
"""Time of clearing a tile counter, a workspace of a few bytes, before the launch."""
COUNTER_BYTES: Final = 64
SPLIT_US: Final = 2.632
PARTIAL_US: Final = 2.553e-6
"""Time of the split-K reduction, and its addition per result and part of k."""
FITTED: Final = (
    *("LAUNCH_US", "PRODUCT_US", "BLOCKWISE", "COOPERATIVE", "LOAD_US", "DELIVERY_US", "UNALIGNED", "SECTORS", "ZEROS"),
    *("SHARED_US", "K_BLOCK_US", "ROUND_US", "RESULT_US", "VECTOR_RESULT_US", "BLOCKWISE_RESULT_US", "BESIDE", "HEAT"),
    *("BLOCKWISE_HEAT", "HOT_US", "WHOLE_ROUNDS", "BYTES_A_US", "OVERLAP", "COUNTER_US", "SPLIT_US", "PARTIAL_US"),
)
"""The constants above that `python -m bench.fit_estimates` fits."""
WGMMA_M: Final = 64
"""The M side of `wgmma`."""
LARGE_TILE: Final = 192 * 128
"""Results of a tile from which all consumers of a block are assumed to share it, if the library does not tell."""

_NAMED: Final = (
    "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 64x128 128x64 "
    "64x256 128x128 256x64 64x512 128x256 256x128 512x64 64x96 96x64 96x128 128x160 160x128 192x128 128x192 128x96 "
    "32x256 256x32"
)
"""cublasLtMatmulTile_t from 1 on; the values that follow these in cublasLt.h obey a rule (see `tiles`)."""
_SMALL_CLUSTERS: Final = (1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (4, 4)
_LARGE_CLUSTERS: Final = (8, 1), (1, 8), (8, 2), (2, 8), (16, 1), (1, 16)
CLUSTERS: Final = dict(enumerate((*_SMALL_CLUSTERS, *_LARGE_CLUSTERS), 2))
"""cublasLtClusterShape_t: blocks along the channels, and along the tokens."""
_TILE_ID, _SPLITK_NUM, _CUSTOM_OPTION, _CLUSTER_SHAPE_ID = (1, 4), (2, 4), (5, 4), (8, 2)
"""Values of cublasLtMatmulAlgoConfigAttributes_t, and the bytes of each attribute."""


@cache
def tiles() -> dict[int, tuple[int, int]]:
    """Return the tiles by their numbers in cublasLt.h, as channels x tokens."""
    named = [(int(rows), int(cols)) for rows, cols in (name.split("x") for name in _NAMED.split())]
    steps = range(8, 769, 8), range(64, 769, 64)
    for (all_rows, all_cols), most in ((steps, 768 * 64), (steps[::-1], 256 * 256)):
        known = set(named)
        shapes = ((rows, cols) for rows in all_rows for cols in all_cols)
        named += [shape for shape in shapes if shape[0] * shape[1] <= most and shape not in known]
    return dict(enumerate(named, 1))


class Config(NamedTuple):
    """An algorithm's tile of channels x tokens (0 x 0: unknown), parts of k, and cluster."""

    channels: int
    tokens: int
    split_k: int
    cluster_channels: int
    cluster_tokens: int
    custom: int | None = None
    """The library's custom option, if its meaning is known. Bit 0: channels are on the M side of `wgmma`, else tokens;
    bit 2: all consumers of a block share a tile, else they alternate (ping-pong)."""

    @classmethod
    def of(cls, library: Library, algorithm: bytes) -> "Config":
        """Return the config of an algorithm, from the library's attributes."""
        tile = tiles().get(attribute(library, algorithm, _TILE_ID), (0, 0))
        cluster = CLUSTERS.get(attribute(library, algorithm, _CLUSTER_SHAPE_ID), (1, 1))
        split = max(1, attribute(library, algorithm, _SPLITK_NUM))
        custom = attribute(library, algorithm, _CUSTOM_OPTION) if library.version in MEASURED_VERSIONS else None
        return cls(*tile, split, *cluster, custom)

    @property
    def channels_first(self) -> bool:
        """Whether channels are on the M side of `wgmma`."""
        return self.channels % WGMMA_M == 0 if self.custom is None else bool(self.custom & 1)

    @property
    def cooperative(self) -> bool:
        """Whether all consumers of a block share a tile."""
        return self.channels * self.tokens >= LARGE_TILE if self.custom is None else bool(self.custom & 4)


class Work(NamedTuple):
    """The properties of a product that its time depends on, beside the algorithm."""

    m: int
    n: int
    k: int
    vectors: bool
    """Whether rows and channels have scales of their own."""
    blockwise: bool
    """Whether scales change along k."""
    out_bytes: int
    """Bytes per result."""
    multiprocessors: int


def us(work: Work, config: Config, workspace_bytes: int) -> float:
    """Return the estimated microseconds of an algorithm; infinite if its tile is unknown.

    A k-block of a tile takes as long as its products or its shared-memory traffic, whichever is longer. Tiles are made
    in rounds over the device. The product takes no less than the memory and the loads need.
    """
    channels, tokens, split_k, along_n, along_m = config[:5]
    if not channels:
        return math.inf
    blocks = _blocks(work, config)
    share = blocks / work.multiprocessors
    rounds = math.ceil(share)
    k_blocks = ceil_div(ceil_div(work.k, split_k), BLOCK)
    rounds_paid = WHOLE_ROUNDS * rounds + (1 - WHOLE_ROUNDS) * max(1.0, share)
    cool = rounds_paid * k_blocks * _k_block_us(work, config)
    heat = (BLOCKWISE_HEAT if work.blockwise else HEAT) * cool / (cool + HOT_US)
    products = k_blocks * _k_block_us(work, config) * (1 + heat)
    result = RESULT_US + (BLOCKWISE_RESULT_US if work.blockwise else VECTOR_RESULT_US if work.vectors else 0.0)
    end = ROUND_US + channels * tokens * result
    if config.cooperative:
        busy = rounds_paid * (products + end)
    else:  # the epilogue of one tile overlaps with the products of another
        busy = (rounds_paid - 1) * max(products, (products + BESIDE * end) / 2) + products + end
    zeros = ZEROS * max(0, tokens - work.m)
    rows = channels / along_m + tokens / along_n
    loads = blocks * k_blocks * (rows * LOAD_US + (channels + tokens + zeros) * DELIVERY_US) / work.multiprocessors
    if work.k % BLOCK:
        loads *= 1 + (UNALIGNED if work.k % SECTOR else SECTORS)
    memory = moved_bytes(work) / BYTES_A_US
    found = LAUNCH_US + overlapped_us(OVERLAP, memory, busy, loads)
    if counts_tiles(workspace_bytes):
        found += COUNTER_US
    if split_k > 1:
        found += SPLIT_US + PARTIAL_US * work.m * work.n * split_k
    return found


def counts_tiles(workspace_bytes: int) -> bool:
    """Return whether a workspace is a tile counter."""
    return 0 < workspace_bytes <= COUNTER_BYTES


def moved_bytes(work: Work) -> int:
    """Return the bytes of the operands and of the result."""
    return work.n * work.k + work.m * work.k + work.out_bytes * work.m * work.n


def whole_tiles(work: Work, config: Config) -> tuple[int, int]:
    """Return the number of tiles along the channels and along the tokens, in whole clusters."""
    channels, tokens, _, along_n, along_m = config[:5]
    along = ceil_div(ceil_div(work.n, channels), along_n) * along_n
    return along, ceil_div(ceil_div(work.m, tokens), along_m) * along_m


def _blocks(work: Work, config: Config) -> int:
    whole_n, whole_m = whole_tiles(work, config)
    return whole_n * whole_m * config.split_k


def _k_block_us(work: Work, config: Config) -> float:
    """Return the microseconds of a tile for a k-block, without waiting for loads."""
    channels, tokens = config[:2]
    rows, columns = (channels, tokens) if config.channels_first else (tokens, channels)
    slices = ceil_div(rows, WGMMA_M)
    products = slices * WGMMA_M * columns * PRODUCT_US * (BLOCKWISE if work.blockwise else 1.0)
    shared = SHARED_US * (slices * (WGMMA_M + columns) + rows + columns)
    return (max(products, shared) + K_BLOCK_US) * (COOPERATIVE if config.cooperative else 1.0)


def attribute(library: Library, algorithm: bytes, which: tuple[int, int]) -> int:
    """Return an attribute of an algorithm by its number and its bytes; 0 if the algorithm lacks it."""
    value, written = ctypes.c_uint32(), ctypes.c_size_t()
    status = library.function("MatmulAlgoConfigGetAttribute")(
        algorithm, which[0], ctypes.addressof(value), which[1], ctypes.addressof(written)
    )
    return 0 if status else value.value
