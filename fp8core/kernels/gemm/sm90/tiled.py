"""Products of many rows on sm_90a, tile by tile: ``cuda_src/gemm/sm90/tiled.cu`` (experiments/2026-11-tiled)."""

from typing import Final, NamedTuple

from fp8core.dtypes import HIGH_PRECISION, ITEMSIZE
from fp8core.kernels.encodings import FORMAT, RESULT, TYPE, ceil_div, round_up
from fp8core.kernels.gemm.args import Maps, Matmul, ending, ready
from fp8core.kernels.gemm.generic import clearing_amax
from fp8core.kernels.gemm.requirements import (
    CODES_AT_16,
    COUNTABLE,
    FLOAT32_SCALES,
    MIXED_SCALES,
    OCP,
    OCP_FORMATS,
    STRIDES_OF_16,
    WHOLE_ELEMENTS,
    WHOLE_WORDS,
)
from fp8core.kernels.gemm.scales import in_groups
from fp8core.kernels.gemm.sm90.decode import CommonArgs
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K
from fp8core.kernels.gemm.sm90.tensor_maps import WordMaps, shared_maps, tensor_maps
from fp8core.kernels.gemm.sm90.tiled_choice import by_cost, fastest, least_us
from fp8core.kernels.gemm.sm90.tiled_cost import Scales, Tile, scales_of, staged_piece, stores_tiles
from fp8core.kernels.requirements import CUDA, supports
from fp8core.problem import ScaledMm
from fp8core.runtime import jit
from fp8core.runtime.args import Float32, Pointer, TensorMap
from fp8core.table import Kernel, Requirement

SCALES: Final[dict[Scales, int]] = {"chain": 0, "promoted": 1, "block": 2, "group": 3}
STAGED_ROWS: Final = 64
"""Rows of the result in a staging buffer of a warpgroup."""
WARP_ROWS: Final = 16
"""Those of a warp, which stores them by itself if k is split."""


class TiledArgs(NamedTuple):
    """The arguments of sm90_tiled: TILED_PARAMETERS of cuda_src/gemm/sm90/tiled_constants.cuh, and three of its own."""

    weight_map: TensorMap
    a_map: TensorMap
    out_map: TensorMap
    scale_map: TensorMap
    common: CommonArgs
    out_scale: Pointer
    amax: Pointer
    beta: Float32


LEAST_STAGES: Final = 3
PINGPONG_STAGES: Final = 5
"""Least stages of ping-pong tiles, where a warpgroup may wait for its buffers while the other multiplies. One fewer is
enough if stores wait longer (`Layout.of`)."""
RING_ALIGNMENT: Final = 1024
"""The ring begins at a multiple of these bytes in dynamic shared memory, as tiles with a 128-byte swizzle have to."""
STAGE_BARRIER_BYTES: Final = 16
"""Of the two barriers of a stage, full and empty."""
STATIC_BYTES: Final = 224
"""The most static shared memory of `make_tiles` (tiled_block.cuh) that depends on no tile: up to 7 barriers of vectors,
one of the parts of k and 2 origins of tiles are 104 bytes, and padding up to 120, as the stages' scales are aligned to
128."""


class Layout(NamedTuple):
    """The layout of a block's shared memory."""

    stages: int
    """k-blocks of the ring."""
    piece_bytes: int
    """Bytes per row of a staged piece of the result."""
    buffers: int
    """Pieces that a warpgroup stages at a time."""
    dynamic_bytes: int

    @classmethod
    def of(cls, problem: ScaledMm, tile: Tile, table_bytes: int = 0) -> "Layout":
        """Return a layout with a buffer per piece of a tile, or fewer if that would leave too few stages.

        Args:
            problem: the product.
            tile: its tile.
            table_bytes: the bytes of a grouped product's table of groups.
        """
        scales, row_bytes = scales_of(problem), tile.columns * ITEMSIZE[problem.out]
        along_k = scales in ("block", "group")
        piece = staged_piece(tile, ITEMSIZE[problem.out])
        words = tile.rows + (tile.columns if scales == "group" else 32) if along_k else 1
        vectors = (0 if along_k else tile.rows + tile.columns) + (tile.columns if problem.bias else int(along_k))
        static_bytes = STATIC_BYTES + 4 * 2 * vectors + table_bytes
        left = problem.target.shared_bytes - static_bytes - RING_ALIGNMENT - 4 * tile.received
        pieces = tile.m_slices * row_bytes // piece
        stores_wait = problem.beta != 0 or ITEMSIZE[problem.out] == 4  # for loads of addends, or for many pieces
        least = PINGPONG_STAGES - stores_wait if tile.pingpong else LEAST_STAGES
        for buffers in (number for number in range(pieces, 0, -1) if pieces % number == 0):
            staging = tile.groups * buffers * STAGED_ROWS * piece
            stages = (left - staging) // (tile.stage_bytes + 4 * words + STAGE_BARRIER_BYTES)
            if stages >= least:
                break
        return cls(stages, piece, buffers, stages * tile.stage_bytes + staging + 4 * tile.received + RING_ALIGNMENT)


def loads_scale_tiles(problem: ScaledMm) -> bool:
    """Return whether TMA can load 1x128 scales of a: those of neighbouring rows are adjacent in memory, and aligned."""
    rows, k_blocks = problem.scale_a_strides
    neighbours = rows == 1 and k_blocks >= 0 and k_blocks % 4 == 0
    aligned = max(problem.vectors_alignment, problem.scale_a_alignment) % 16 == 0
    return scales_of(problem) == "block" and neighbours and aligned


def launch_cluster(problem: ScaledMm, tile: Tile) -> int:
    """Return the cluster size of a launch: blocks that share a tile or multicast, or two if each has several tiles.

    The blocks of a cluster run on neighbouring multiprocessors. Two consecutive blocks have tiles of the same channels,
    which neighbours read at less cost (experiments/2026-11-neighbours).
    """
    if tile.split_k > 1:
        return tile.split_k
    several = tile.tiles(problem.m, problem.n) > problem.target.multiprocessors and problem.m > tile.rows
    return 2 if tile.cluster == 1 and several and scales_of(problem) == "block" else tile.cluster


def constants(
    problem: ScaledMm, tile: Tile, layout: Layout, *, scale_tiles: bool, group_table: int = 0
) -> dict[str, int]:
    """Return the constants of ``cuda_src/gemm/sm90/tiled_constants.cuh``."""
    return {
        "FP8_GROUPS": tile.groups,
        "FP8_M_SLICES": tile.m_slices,
        "FP8_PINGPONG": int(tile.pingpong),
        "FP8_COLUMNS": tile.columns,
        "FP8_STAGES": layout.stages,
        "FP8_A_TYPE": FORMAT[problem.a],
        "FP8_B_TYPE": FORMAT[problem.b],
        "FP8_SCALES": SCALES[scales_of(problem)],
        "FP8_SCALE_TILES": int(scale_tiles),
        "FP8_OUT": RESULT[problem.out],
        "FP8_BIAS": TYPE[problem.bias] if problem.bias else -1,
        "FP8_AMAX": int(problem.amax),
        **ending(problem),
        "FP8_STORE_TILES": int(stores_tiles(problem)),
        "FP8_BUFFERS": layout.buffers,
        "FP8_CLUSTER": tile.cluster,
        "FP8_SPLIT_K": tile.split_k,
        "FP8_GROUP_TABLE": group_table,
    }


class MapsOf(NamedTuple):
    """The tensor maps of a product's operands."""

    weight: Maps
    a: Maps
    out: Maps
    scales: Maps
    """Those of a, if TMA loads them; otherwise zeros at address 0."""


def maps_of(
    problem: ScaledMm, tile: Tile, layout: Layout, *, weight_rows: int, scale_tiles: bool, shares_a: bool = False
) -> MapsOf:
    """Return the tensor maps of a product's operands.

    Args:
        problem: the product.
        tile: its tile.
        layout: that of shared memory.
        weight_rows: the rows of the weight's memory.
        scale_tiles: whether TMA loads the scales of a.
        shares_a: whether the blocks of a cluster share rows of a, and not the weight's.
    """
    item = ITEMSIZE[problem.out]
    out_maps: Maps = NO_MAPS
    scale_maps: Maps = {0: bytes(128)}
    if stores_tiles(problem):
        rows = WARP_ROWS if tile.split_k > 1 else STAGED_ROWS
        out_maps = tensor_maps(problem.m, problem.n * item, problem.ldo * item, rows, layout.piece_bytes)
    if scale_tiles:
        scale_stride = 4 * problem.scale_a_strides[1]
        scale_maps = shared_maps(WordMaps, ceil_div(problem.k, BLOCK_K), problem.m, scale_stride, 1, tile.rows)
    # A box has no more rows than a, rounded up to 8: TMA takes longer to fill rows with zeros than to load them.
    a_rows = min(tile.rows, round_up(problem.m, 8))
    columns = tile.columns // tile.cluster
    if shares_a and tile.cluster > 1:
        a_rows, columns = tile.rows // tile.cluster, tile.columns
    a_maps = tensor_maps(problem.m, problem.k, problem.lda, a_rows)
    b_maps = tensor_maps(weight_rows, problem.k, problem.ldb, columns)
    return MapsOf(b_maps, a_maps, out_maps, scale_maps)


def tiled(problem: ScaledMm, tile: Tile | None = None) -> Matmul:
    """Return one launch for any number of rows: ``round(scale_a * (scale_b * acc) + bias)``.

    Scales that change along k are applied after every k-block of 128.
    """
    problem = in_groups(problem)
    tile = tile or fastest(problem)
    layout, scale_tiles = Layout.of(problem, tile), loads_scale_tiles(problem)
    cluster = launch_cluster(problem, tile)
    launcher = jit.prepare(
        problem.target,
        "gemm/sm90/tiled",
        "sm90_tiled",
        constants(problem, tile, layout, scale_tiles=scale_tiles),
        TiledArgs,
        block=128 * (1 + tile.groups),
        shared_bytes=layout.dynamic_bytes,
        programmatic=True,
        cluster=cluster,
    )
    most = max(1, problem.target.multiprocessors // cluster) * cluster
    numbers = TiledArgs(b"", b"", b"", b"", CommonArgs.of(problem), 0, 0, problem.beta)
    blocks = tile.tiles(problem.m, problem.n) * tile.split_k
    multiply = launcher.bind_args((blocks if tile.split_k > 1 else min(blocks, most), 1, 1), numbers)
    b_maps, a_maps, out_maps, scale_maps = maps_of(
        problem, tile, layout, weight_rows=problem.n, scale_tiles=scale_tiles
    )

    def launch(
        stream: int, a: int, b: int, scale_a: int, scale_b: int, bias: int, out: int, out_scale: int, amax: int, _: int
    ) -> None:
        multiply(
            stream,
            b_maps[b],
            a_maps[a],
            out_maps[out],
            scale_maps[scale_a if scale_tiles else 0],
            scale_a,
            scale_b,
            bias,
            out,
            out_scale,
            amax,
        )

    return ready(clearing_amax(problem, launch), prefetches_weight=True)


class _NoMaps(dict[int, bytes]):
    def __missing__(self, pointer: int) -> bytes:
        return bytes(128)


NO_MAPS: Final = _NoMaps()
"""The maps of a tensor that TMA does not access: 128 zero bytes for any address."""

ALGORITHMS: Final = 3
"""How many tiles `tune` times."""


def algorithms(problem: ScaledMm) -> tuple[str, ...]:
    """Return the names of the tiles with the least estimates."""
    return tuple(str(tile) for tile in by_cost(problem)[:ALGORITHMS])


def plan_tiled(problem: ScaledMm, algorithm: int = 0) -> Matmul:
    """Return the launch of the row "sm90_tiled", by tile number ``algorithm`` in the order of estimates."""
    return tiled(problem, by_cost(problem)[algorithm])


OCP_RESULT: Final = Requirement(
    lambda p: p.out in HIGH_PRECISION or p.out in OCP,
    "gives float32, float16, bfloat16, e4m3fn or e5m2, got {p.out}",
)
ANY_ORDER: Final = Requirement(
    lambda p: not p.batch_invariant,
    "not batch-invariant: accumulates k in a different order from sm90_decode, which serves m <= 64",
)

SM90_TILED: Final = Kernel(
    "sm90_tiled",
    (
        CUDA,
        supports("wgmma"),
        ANY_ORDER,
        OCP_FORMATS,
        MIXED_SCALES,
        FLOAT32_SCALES,
        OCP_RESULT,
        CODES_AT_16,
        STRIDES_OF_16,
        COUNTABLE,
        WHOLE_ELEMENTS,
        WHOLE_WORDS,
    ),
    plan_tiled,
    algorithms=algorithms,
    us=least_us,
)
"""The row of `scaled_mm` for many rows on Hopper."""
