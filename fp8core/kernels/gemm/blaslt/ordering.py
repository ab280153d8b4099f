"""How long an algorithm of cuBLASLt is likely to take on Hopper, judged by its tile and its cluster.

On an H200, over 116 products of 65 to 8,192 rows with scales per tensor or per row, what `cost` puts first was 1.0 %
slower on average, and 12 % at most, than the best of all offers, torch, vLLM and SGLang; what the library puts first
was 15 % slower on average and 123 % at most (experiments/2026-11-many-rows).
"""

import ctypes
import math
from functools import cache
from typing import Final, NamedTuple

from fp8core.kernels.gemm.blaslt.library import Library

LOAD_COST: Final = 56
"""Products of codes that a multiprocessor does while it loads one: nominally 64, which a fit made 56."""
LARGE_TILE: Final = 192 * 128
"""From here on a tile takes all consumers of a block, so that nothing is multiplied while it is written out."""
LARGE_TILE_COST: Final = 1.05

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


def cost(library: Library, algorithm: bytes, m: int, n: int, multiprocessors: int) -> float:
    """Return what orders algorithms by their time: rounds over the device, times what a tile takes for one of k.

    A tile takes as long as its products or its loads, of which the blocks of a cluster share what they have in common.
    Splitting k is counted as gaining nothing, which is nearly so: its parts have to be added up.
    """
    rows, cols, split_k, along_n, along_m = Config.of(library, algorithm)
    if not rows:
        return math.inf
    blocks = -(-n // rows) * -(-m // cols) * split_k
    products = rows * cols * (LARGE_TILE_COST if rows * cols >= LARGE_TILE else 1.0)
    return -(-blocks // multiprocessors) * max(products, LOAD_COST * (rows / along_m + cols / along_n))


def attribute(library: Library, algorithm: bytes, which: tuple[int, int]) -> int:
    """Return an attribute of an algorithm by its number and its bytes; 0 of one that it lacks."""
    value, written = ctypes.c_uint32(), ctypes.c_size_t()
    status = library.function("MatmulAlgoConfigGetAttribute")(
        algorithm, which[0], ctypes.addressof(value), which[1], ctypes.addressof(written)
    )
    return 0 if status else value.value
