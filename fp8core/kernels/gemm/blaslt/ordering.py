"""How long an algorithm of cuBLASLt is likely to take on Hopper, judged by its tile, its cluster and its workspace.

The constants are fitted to products of `bench/choice_cases.py`, on an H200, and judged on others
(tests/package/test_choice.py; experiments/2026-11-choice).
"""

import ctypes
import math
from functools import cache
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.blaslt.library import Library
from fp8core.problem import BLOCK

LAUNCH_US: Final = 2.7
"""Of a launch and of filling the pipelines, when weights come from memory."""
PRODUCT_US: Final = 2.055e-5
"""Of a multiprocessor, for one result of a tile and a k-block of 128."""
BLOCKWISE: Final = 1.029
"""Times as much with scales that change along k."""
LARGE_TILE: Final = 192 * 128
"""From here on a tile takes all consumers of a block, so that nothing is multiplied while it is written out."""
LARGE: Final = 1.143
LARGE_BLOCKWISE: Final = 1.179
"""Times as much for such a tile."""
LOAD_US: Final = 1.339e-3
"""Of a multiprocessor, for a row of 128 codes that it loads. Blocks of a cluster share what they have in common."""
UNALIGNED: Final = 0.611
"""The part by which loads take longer where rows do not begin at multiples of 128 bytes."""
ZEROS: Final = 2.3
"""How many rows more each row counts for that a tile has beyond those of a, and that TMA fills with zeros."""
HIDDEN: Final = 0.875
"""The part of the lesser of products and loads that the greater one hides."""
SHARED_US: Final = 0.342e-3
"""Of a multiprocessor, for a row of 128 codes that `wgmma` reads from shared memory, or that is written there."""
SWAPPED: Final = 1.107
"""Times as much where tokens are on its M side."""
SHARED_WEIGHT_US: Final = 0.0139
"""Of a k-block whose weight is loaded for several blocks: they wait for one another."""
ROUND_US: Final = 0.398
"""Of a round: of filling a pipeline anew."""
RESULT_US: Final = 1.87e-5
BLOCKWISE_RESULT_US: Final = 4.18e-5
"""Of a tile's end, for one result, and more of it with scales that change along k."""
HEAT: Final = 0.014
BLOCKWISE_HEAT: Final = 0.196
"""What a k-block takes more in a product of many rounds, as the clock falls; of a few of them, a part of it."""
WHOLE_ROUNDS: Final = 0.77
"""By which part the time grows with whole rounds; by the rest it grows with tiles."""
BYTES_A_US: Final = 4.18e6
"""From memory."""
OVERLAP: Final = 3.7
"""The exponent of the norm that joins the times of the memory and of the multiprocessors: the greater hides most."""
NARROW: Final = 128
PAIRED: Final = 1.081
"""Times as much for one round of tiles of fewer than `NARROW` channels whose blocks share tokens in pairs: what holds
them up is not known."""
COUNTER_US: Final = 4.26
"""Of clearing a counter of tiles, a workspace of a few bytes, before the launch."""
COUNTER_BYTES: Final = 64
SPLIT_US: Final = 2.87
PARTIAL_US: Final = 2.61e-6
"""Of adding up the parts of a k that is split, and for one number of one part."""
WGMMA_M: Final = 64
"""The M side of `wgmma`, which has the tile's channels, or its tokens if the channels are no multiple of it."""

_NAMED: Final = (
    "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 64x128 128x64 "
    "64x256 128x128 256x64 64x512 128x256 256x128 512x64 64x96 96x64 96x128 128x160 160x128 192x128 128x192 128x96 "
    "32x256 256x32"
)
"""cublasLtMatmulTile_t from 1 on; what follows them in cublasLt.h keeps to a rule."""
_SMALL_CLUSTERS: Final = (1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (4, 4)
_LARGE_CLUSTERS: Final = (8, 1), (1, 8), (8, 2), (2, 8), (16, 1), (1, 16)
CLUSTERS: Final = dict(enumerate((*_SMALL_CLUSTERS, *_LARGE_CLUSTERS), 2))
"""cublasLtClusterShape_t: blocks along the channels, and along the tokens."""
_TILE_ID, _SPLITK_NUM, _CLUSTER_SHAPE_ID = (1, 4), (2, 4), (8, 2)
"""Of cublasLtMatmulAlgoConfigAttributes_t, with their bytes."""


@cache
def tiles() -> dict[int, tuple[int, int]]:
    """Return the tiles by their numbers in cublasLt.h: channels x tokens, in the orientation of `product`."""
    named = [(int(rows), int(cols)) for rows, cols in (name.split("x") for name in _NAMED.split())]
    steps = range(8, 769, 8), range(64, 769, 64)
    for (all_rows, all_cols), most in ((steps, 768 * 64), (steps[::-1], 256 * 256)):
        known = set(named)
        shapes = ((rows, cols) for rows in all_rows for cols in all_cols)
        named += [shape for shape in shapes if shape[0] * shape[1] <= most and shape not in known]
    return dict(enumerate(named, 1))


class Config(NamedTuple):
    """What is known of an algorithm: its tile of channels x tokens (0 x 0: unknown), parts of k, and its cluster."""

    channels: int
    tokens: int
    split_k: int
    cluster_channels: int
    cluster_tokens: int

    @classmethod
    def of(cls, library: Library, algorithm: bytes) -> "Config":
        """Return what the library says of one of its algorithms."""
        tile = tiles().get(attribute(library, algorithm, _TILE_ID), (0, 0))
        cluster = CLUSTERS.get(attribute(library, algorithm, _CLUSTER_SHAPE_ID), (1, 1))
        return cls(*tile, max(1, attribute(library, algorithm, _SPLITK_NUM)), *cluster)


class Work(NamedTuple):
    """What the time of a product depends on, beside the algorithm."""

    m: int
    n: int
    k: int
    blockwise: bool
    """Whether scales change along k."""
    out_bytes: int
    """Of one result."""
    multiprocessors: int


def us(work: Work, config: Config, workspace_bytes: int) -> float:
    """Return the microseconds that an algorithm is likely to take; infinite for a tile that is not known.

    A tile takes as long for a k-block as its products, its loads or its reads of shared memory, whichever is longest.
    Tiles come in rounds over the device, and all of it takes no less than the memory needs.
    """
    channels, tokens, split_k, along_n, along_m = config
    if not channels:
        return math.inf
    whole_n = ceil_div(ceil_div(work.n, channels), along_n) * along_n
    whole_m = ceil_div(ceil_div(work.m, tokens), along_m) * along_m
    share = whole_n * whole_m * split_k / work.multiprocessors
    rounds = math.ceil(share)
    k_block = _k_block_us(work, config) * (1 + (BLOCKWISE_HEAT if work.blockwise else HEAT) * (1 - 1 / rounds))
    end = channels * tokens * (RESULT_US + (BLOCKWISE_RESULT_US if work.blockwise else 0.0))
    k_blocks = ceil_div(ceil_div(work.k, split_k), BLOCK)
    busy = (WHOLE_ROUNDS * rounds + (1 - WHOLE_ROUNDS) * max(1.0, share)) * (k_blocks * k_block + ROUND_US + end)
    moved = work.n * work.k + work.m * work.k + work.out_bytes * work.m * work.n
    memory = moved / BYTES_A_US
    slower = PAIRED if rounds == 1 and channels < NARROW and (along_n, along_m) == (2, 1) else 1.0
    found = LAUNCH_US + slower * float((memory**OVERLAP + busy**OVERLAP) ** (1 / OVERLAP))
    if 0 < workspace_bytes <= COUNTER_BYTES:
        found += COUNTER_US
    if split_k > 1:
        found += SPLIT_US + PARTIAL_US * work.m * work.n * split_k
    return found


def _k_block_us(work: Work, config: Config) -> float:
    """Return what a tile takes for a k-block, if nothing else were going on."""
    channels, tokens, _, along_n, along_m = config
    products = channels * tokens * PRODUCT_US * (BLOCKWISE if work.blockwise else 1.0)
    if channels * tokens >= LARGE_TILE:
        products *= LARGE_BLOCKWISE if work.blockwise else LARGE
    zeros = ZEROS * max(0, tokens - work.m)
    loads = LOAD_US * (channels / along_m + (tokens + zeros) / along_n)
    if work.k % BLOCK:
        loads *= 1 + UNALIGNED
    swapped = channels % WGMMA_M != 0
    rows, columns = (tokens, channels) if swapped else (channels, tokens)
    shared = SHARED_US * (ceil_div(rows, WGMMA_M) * (WGMMA_M + columns) + rows + columns)
    if swapped:
        shared *= SWAPPED
    longest = max(products, loads, shared) + (1 - HIDDEN) * min(products, loads)
    return longest + (SHARED_WEIGHT_US if along_m > 1 else 0.0)


def attribute(library: Library, algorithm: bytes, which: tuple[int, int]) -> int:
    """Return an attribute of an algorithm by its number and its bytes; 0 of one that it lacks."""
    value, written = ctypes.c_uint32(), ctypes.c_size_t()
    status = library.function("MatmulAlgoConfigGetAttribute")(
        algorithm, which[0], ctypes.addressof(value), which[1], ctypes.addressof(written)
    )
    return 0 if status else value.value
