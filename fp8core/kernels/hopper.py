"""Products of few rows on sm_90a: the weight streamed at the memory's speed (``cuda_src/hopper_decode.cu``).

Everything that a launch needs follows from plain arithmetic on the problem: how a product is laid over the
multiprocessors (`layout`), what fits into their shared memory (`stages`), and the tensor maps, which hold
addresses and so are made when an address is first met.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

from fp8core import device, jit
from fp8core.dispatch import Kernel, Requirement
from fp8core.kernels.requirements import aligned, arch, platform
from fp8core.kernels.words import TYPE, ceil_div
from fp8core.problem import ITEMSIZE, WIDE, ScaledMm, Target

MOST_ROWS: Final = 64
"""Rows of a that one launch takes."""
WIDTHS: Final = (8, 16, 32, 64)
"""The narrow sides of wgmma that kernels are compiled for."""
CHUNK: Final = 128
"""Columns of k that pass through a ring at a time."""
CLUSTERS: Final = {1: 132, 2: 66, 4: 30, 8: 15}
"""How many clusters of so many blocks fit on 132 multiprocessors at one block each (H200, by the driver's count)."""
A_STAGES: Final = {8: 16, 16: 16, 32: 12, 64: 6}
"""Chunks of a in flight by the narrow side: a microsecond of them, and no more room than they are worth."""
TENSOR_CORE_TYPES: Final = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
MAPS_KEPT: Final = 4096
"""A plan forgets its tensor maps when it has met so many addresses."""

SIGNATURE: Final = "128s128sPqqPqqPPqiii"
"""weight's map, a's map, scale_a and its strides, scale_b and its strides, bias, out, ldo, m, n, chunks."""


class Layout(NamedTuple):
    """How a product lies on the multiprocessors."""

    blocks: int
    """Of a cluster: each takes a part of k of the cluster's tiles."""
    clusters: int
    row_groups: int
    """Groups of 128 threads that have 64 channels of the tile each."""
    k_groups: int
    """Groups that take the chunks of the same channels in turn."""
    a_stages: int
    """Chunks of a in flight."""

    @property
    def tile(self) -> int:
        """Channels of a tile."""
        return 64 * self.row_groups


def width(m: int) -> int:
    """Return the narrow side of wgmma that holds ``m`` rows."""
    return next(side for side in WIDTHS if side >= m)


def room(target: Target) -> dict[int, int]:
    """Return how many clusters of each size a device holds at a time, one block a multiprocessor."""
    return {blocks: count * target.multiprocessors // 132 for blocks, count in CLUSTERS.items()}


@cache
def layout(n: int, k: int, side: int, blockwise: bool, target: Target) -> Layout:
    """Return how the product of a weight ``[n, k]`` with ``side`` (padded) rows is laid out.

    The time is taken as that of the busiest block plus what sharing a tile costs; constants from a sweep on an H200.
    """
    chunks = ceil_div(k, CHUNK)
    best: tuple[float, Layout] | None = None
    for row_groups, k_groups in ((1, 2), (2, 1)):
        for blocks, most in room(target).items():
            tiles = ceil_div(n, 64 * row_groups)
            if blocks > chunks:
                continue
            clusters = min(tiles, most)
            turns = ceil_div(tiles, clusters)
            cost = turns * ceil_div(chunks, blocks) * row_groups + {1: 0, 2: 2, 4: 4, 8: 8}[blocks] * turns
            found = (cost, Layout(blocks, clusters, row_groups, k_groups, A_STAGES[side]))
            if best is None or found[0] < best[0]:
                best = found
    assert best is not None
    return best[1]


def ring_bytes(plan: Layout, side: int, stages_: int) -> int:
    """Return the dynamic shared memory of a block: both rings, the slots of partial sums, and what aligning takes."""
    rings = stages_ * plan.tile * CHUNK + plan.a_stages * side * CHUNK
    units = plan.tile // 8 // plan.blocks
    return rings + (plan.blocks * plan.k_groups - 1) * units * 8 * side * 4 + 1024


def fixed_bytes(plan: Layout, side: int, scale_rows: int, stages_: int) -> int:
    """Return the static shared memory of a block; ``scale_rows`` channels share a scale of the weight, 0 if per row."""
    barriers = 8 * (2 * stages_ + 2 * plan.a_stages + 2)
    weight_scales = ceil_div(plan.tile, scale_rows) if scale_rows else 0
    scales = 4 * plan.a_stages * (side + weight_scales) if scale_rows else 0
    return barriers + scales + 4 * side + 64


def stages(plan: Layout, side: int, scale_rows: int, target: Target) -> int:
    """Return how many chunks of the weight fit into a block's ring: a multiple of the groups that take turns."""
    count = plan.k_groups
    while True:
        more = count + plan.k_groups
        if ring_bytes(plan, side, more) + fixed_bytes(plan, side, scale_rows, more) > target.shared_bytes:
            return count
        count = more


class TensorMaps:
    """Tensor maps of row-major bytes by address: all else about the tensor is fixed, so that a hit is a look-up."""

    def __init__(self, rows: int, columns: int, stride: int, box_rows: int) -> None:
        self._geometry = (rows, columns, stride, box_rows)
        self._maps: dict[int, bytes] = {}

    def __call__(self, pointer: int) -> bytes:
        """Return the map of the tensor at ``pointer``."""
        found = self._maps.get(pointer)
        if found is None:
            if len(self._maps) >= MAPS_KEPT:
                self._maps.clear()
            found = self._maps[pointer] = encode(pointer, *self._geometry)
        return found


def encode(pointer: int, rows: int, columns: int, stride: int, box_rows: int) -> bytes:
    """Return the tensor map of uint8 ``[rows, columns]`` in boxes of ``box_rows`` x 128 bytes, swizzled by 128 bytes.

    What a box has outside the tensor is zero. Rows are ``stride`` bytes apart, a multiple of 16, as the address is.

    Raises:
        BackendError: the driver refuses; the message holds its status and the geometry.
    """
    memory = ctypes.create_string_buffer(128 + 64)
    address = ceil_div(ctypes.addressof(memory), 64) * 64
    wide, narrow = ctypes.c_uint64, ctypes.c_uint32
    uint8, no_interleave, swizzle_128, promote_256, zeros = 0, 0, 3, 3, 0
    status = device.driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        uint8,
        2,
        ctypes.c_void_p(pointer),
        (wide * 2)(columns, rows),
        (wide * 1)(stride),
        (narrow * 2)(CHUNK, box_rows),
        (narrow * 2)(1, 1),
        no_interleave,
        swizzle_128,
        promote_256,
        zeros,
    )
    device.check(status, "cuTensorMapEncodeTiled", f"uint8 [{rows}, {columns}] with rows {stride} apart")
    return ctypes.string_at(address, 128)


class DecodeMm:
    """One launch for up to 64 rows: ``round(scale_a * (scale_b * acc) + bias)``; blocked scales join every 128 of k."""

    scratch_bytes = 0

    def __init__(self, problem: ScaledMm) -> None:
        side = width(problem.m)
        blockwise = problem.scale_a == "group"
        scale_rows = {"block": 128, "group": 1}.get(problem.scale_b, 0)
        # The order of a sum must not depend on m where it is asked not to: nor then may the layout.
        plan = layout(problem.n, problem.k, MOST_ROWS if problem.batch_invariant else side, blockwise, problem.target)
        depth = stages(plan, side, scale_rows, problem.target)
        self._grid = (plan.blocks * plan.clusters, 1, 1)
        self._weight_map = TensorMaps(problem.n, problem.k, problem.ldb, plan.tile)
        self._a_map = TensorMaps(problem.m, problem.k, problem.lda, side)
        self._scale_strides = (problem.scale_a_strides, problem.scale_b_strides)
        self._shape = (problem.ldo, problem.m, problem.n, ceil_div(problem.k, CHUNK))
        self._launcher = jit.prepare(
            problem.target,
            "hopper_decode",
            "hopper_decode",
            {
                "WIDTH": side,
                "ROW_GROUPS": plan.row_groups,
                "K_GROUPS": plan.k_groups,
                "STAGES": depth,
                "A_STAGES": plan.a_stages,
                "A_TYPE": TENSOR_CORE_TYPES[problem.a],
                "B_TYPE": TENSOR_CORE_TYPES[problem.b],
                "BLOCKWISE": int(blockwise),
                "SCALE_ROWS": scale_rows or 128,
                "PROMOTE": 4 if problem.use_fast_accum and not blockwise else 1,
                "OUT": TYPE[problem.out],
                "BIAS": TYPE[problem.bias] if problem.bias else -1,
                "KEEP": 0,
                "BLOCKS": 1,
                "STAGGER": 0,
            },
            SIGNATURE,
            block=128 * plan.row_groups * plan.k_groups + 64 + 32 * blockwise,
            shared_bytes=ring_bytes(plan, side, depth),
            cluster=plan.blocks,
            programmatic=True,
        )

    def __call__(
        self,
        stream: int,
        a: int,
        b: int,
        scale_a: int,
        scale_b: int,
        bias: int,
        out: int,
        _out_scale: int,
        _amax: int,
        _scratch: int,
    ) -> None:
        """Launch; `SCALED_MM`'s parameters."""
        across, down = self._scale_strides
        maps = (self._weight_map(b), self._a_map(a))
        self._launcher(stream, self._grid, *maps, scale_a, *across, scale_b, *down, bias, out, *self._shape)


class Panels:
    """More than 64 rows as launches of 64, each row with the bits that it has alone; every launch reads the weight."""

    scratch_bytes = 0

    def __init__(self, problem: ScaledMm) -> None:
        full, rest = divmod(problem.m, MOST_ROWS)
        sizes = [MOST_ROWS] * full + [rest] * (rest > 0)
        plans = {rows: DecodeMm(problem._replace(m=rows)) for rows in set(sizes)}
        self._launches = [(MOST_ROWS * i, plans[rows]) for i, rows in enumerate(sizes)]
        self._row_bytes = (problem.lda, 4 * problem.scale_a_strides[0], problem.ldo * ITEMSIZE[problem.out])

    def __call__(
        self,
        stream: int,
        a: int,
        b: int,
        scale_a: int,
        scale_b: int,
        bias: int,
        out: int,
        out_scale: int,
        amax: int,
        scratch: int,
    ) -> None:
        """Launch; `SCALED_MM`'s parameters."""
        a_row, scale_row, out_row = self._row_bytes
        for row, launch in self._launches:
            places = (a + row * a_row, b, scale_a + row * scale_row, scale_b, bias, out + row * out_row)
            launch(stream, *places, out_scale, amax, scratch)


def plan_decode(problem: ScaledMm) -> Callable[..., None]:
    """Return the launch of the row "hopper_decode"."""
    return DecodeMm(problem) if problem.m <= MOST_ROWS else Panels(problem)


FEW_ROWS: Final = Requirement(
    lambda p: p.m <= MOST_ROWS or p.batch_invariant,
    f"reads the weight once for every {MOST_ROWS} rows: needs m <= {MOST_ROWS} or batch_invariant, got m={{p.m}}",
)
OCP_FORMATS: Final = Requirement(
    lambda p: p.a in TENSOR_CORE_TYPES and p.b in TENSOR_CORE_TYPES and (p.a, p.b) != ("float8_e5m2", "float8_e5m2"),
    "multiplies e4m3fn by e4m3fn or e5m2, got a {p.a} and b {p.b}",
)
DECODE_SCALES: Final = Requirement(
    lambda p: (
        (p.scale_a in ("tensor", "row") and p.scale_b in ("tensor", "row"))
        or (p.scale_a == "group" and p.scale_b in ("group", "block"))
    ),
    "takes scales per tensor or row in any mix, or 1x128 with 1x128 or 128x128,"
    " got scale_a per {p.scale_a} and scale_b per {p.scale_b}",
)
WIDE_RESULT: Final = Requirement(
    lambda p: p.out in WIDE and not p.out_scale and not p.amax,
    "gives float32, float16 or bfloat16 without out_scale and amax, got {p.out}",
)
STRIDES_OF_16: Final = Requirement(
    lambda p: p.k > 0 and p.lda % 16 == 0 and p.ldb % 16 == 0,
    "needs k > 0 and lda and ldb that are multiples of 16, got k={p.k} lda={p.lda} ldb={p.ldb}",
)
WHOLE_WORDS: Final = Requirement(
    lambda p: p.vectors_alignment % 4 == 0,
    "needs scales and bias at addresses divisible by 4, got {p.vectors_alignment}",
)

HOPPER_ROWS: Final[tuple[Kernel, ...]] = (
    Kernel(
        "hopper_decode",
        (
            platform("cuda"),
            arch(90),
            FEW_ROWS,
            OCP_FORMATS,
            DECODE_SCALES,
            WIDE_RESULT,
            aligned(16),
            STRIDES_OF_16,
            WHOLE_WORDS,
        ),
        plan_decode,
    ),
)
"""The rows of `scaled_mm` that are Hopper's own."""
