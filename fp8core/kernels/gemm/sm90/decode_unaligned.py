"""Products of few rows on sm_90a with operands at any address and stride: a mode of `sm90_decode`.

TMA reads from multiples of 16 bytes. All rows of the weight with the same residue modulo 16, or a divisor of 16, begin
at the same offset from such a multiple. They have a tensor map of their own, and a tile has rows of one residue or two
(`residues`), which the threads that multiply them align in registers (``cuda_src/gemm/sm90/phases.cuh``). So the weight
is never copied. Each block aligns a small unaligned a itself (``loose_rows.cuh``); a larger one is copied first.
"""

import struct
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div, round_up
from fp8core.kernels.gemm.args import Matmul, ready
from fp8core.kernels.gemm.generic import plan_clear_amax
from fp8core.kernels.gemm.realigned import ALIGNMENT, plan_realign
from fp8core.kernels.gemm.requirements import (
    COUNTABLE,
    FLOAT32_SCALES,
    MIXED_SCALES,
    OCP,
    OCP_FORMATS,
    WHOLE_ELEMENTS,
    WHOLE_WORDS,
)
from fp8core.kernels.gemm.scales import in_groups, is_along_k
from fp8core.kernels.gemm.sm90 import decode_unaligned_config, decode_wide_config
from fp8core.kernels.gemm.sm90.decode import CommonArgs, launcher_for, panels
from fp8core.kernels.gemm.sm90.decode_channels_config import CostModel, cheapest, cost_model
from fp8core.kernels.gemm.sm90.decode_config import (
    MOST_ROWS,
    DecodeConfig,
    width,
    without_multicast,
    without_prefetch,
)
from fp8core.kernels.gemm.sm90.loose_rows import (
    a_is_unaligned,
    aligned_config,
    aligns_a,
    loose_batch,
)
from fp8core.kernels.gemm.sm90.residues import (
    CHANNELS,
    lacks_registers,
    pad_channels,
    phases_of,
    residues_of,
    result_spread,
)
from fp8core.kernels.gemm.sm90.tensor_maps import TensorMaps, encode, shared_maps, tensor_maps
from fp8core.kernels.gemm.sm90.tiled import OCP_RESULT
from fp8core.kernels.requirements import CUDA, supports
from fp8core.problem import ScaledMm
from fp8core.runtime.args import Float32, Int32, Int64, PhasedMaps, Pointer, TensorMap
from fp8core.table import Kernel, Launch, Requirement


class Loaded(NamedTuple):
    """Costs of a `TileConfig` for which TMA, not the memory, bounds the loads."""

    k_block_us: float
    tile_us: float


LOADED: Final = {
    (1, 1, 1): Loaded(0.5, 2.1),
    (1, 2, 1): Loaded(0.46, 2.1),
    (2, 1, 1): Loaded(0.4, 3.2),
    (2, 1, 2): Loaded(0.37, 3.2),
}
"""Costs for 64 rows of a, by m_warpgroups, k_warpgroups and multicast_tiles: set by a sweep on an H200
(experiments/2026-11-unaligned-weights)."""


class UnalignedArgs(NamedTuple):
    """The arguments of sm90_decode for a weight at any address."""

    weight_map: PhasedMaps
    a_map: TensorMap
    common: CommonArgs
    out_scale: Pointer
    amax: Pointer
    beta: Float32


class LooseArgs(NamedTuple):
    """The same if the consumer threads align a; x_stride and x_vecs count codes."""

    weight_map: PhasedMaps
    x: Pointer
    x_stride: Int64
    x_vecs: Int32
    upper: Float32
    common: CommonArgs
    out_scale: Pointer
    amax: Pointer
    beta: Float32


class UnalignedMaps(TensorMaps):
    """The PhasedMaps of ``phases.cuh`` by the address of the weight."""

    __slots__ = ()

    def make(self, pointer: int) -> bytes:
        """Return the map of each residue's rows, and the offset of their codes from the beginning of the map's rows.

        TMA reads whole words of 16 bytes, also before a row's first code; memory is allocated in such words.
        """
        rows, columns, stride, *box = self._geometry
        count = phases_of(stride)
        maps, offsets = [], []
        for first in range(min(count, rows)):
            begin = pointer + first * stride
            offset = begin % ALIGNMENT
            of_residue = ceil_div(rows - first, count)
            maps.append(encode(begin - offset, of_residue, offset + columns, stride * count, *box))
            offsets.append(offset)
        missing = ALIGNMENT - len(maps)  # no channels have these residues: what their tiles load is dropped
        return b"".join(maps + maps[:1] * missing) + struct.pack("16i", *offsets, *offsets[:1] * missing)


def layout(problem: ScaledMm) -> DecodeConfig:
    """Return the layout of a product: the cheapest.

    With batch_invariant it is that of `sm90_decode`, but with tiles of channels of one or two residues. So the sums
    have the same order for every m and wherever a begins, and a weight that happens to be aligned gives the same bits.
    """
    if problem.batch_invariant:
        return in_few_panels(problem)
    config = decode_unaligned_config.cheapest(problem)
    if MOST_ROWS < problem.m <= decode_wide_config.MOST_ROWS:
        wide_config = in_few_panels(problem)
        if config is None or us(problem, wide_config) <= us(problem, config):
            return wide_config
    assert config is not None  # SOME_LAYOUT
    return config if problem.prefetch_weight else without_prefetch(config, problem.target)


def us(problem: ScaledMm, config: DecodeConfig) -> float:
    """Return the microseconds of a product in a layout."""
    problem = in_groups(problem)
    if decode_unaligned_config.panel_of(problem, config.panels).m > MOST_ROWS:
        return decode_wide_config.us(wide(problem, config.residues), config)
    return decode_unaligned_config.us(problem, config)


def in_few_panels(problem: ScaledMm) -> DecodeConfig:
    """Return the layout with batch_invariant, and that of 65 to 256 rows in panels of up to 128."""
    config = layout_with(problem, residues_of(problem))
    panel = decode_unaligned_config.panel_of(problem, config.panels)
    return layout_with(problem, 1) if lacks_registers(panel, config) else config


def layout_with(problem: ScaledMm, residues: int) -> DecodeConfig:
    """Return what `in_few_panels` returns, with tiles of so many ``residues``."""
    problem = in_groups(problem)
    count, n = phases_of(problem.ldb), problem.n
    if problem.m > MOST_ROWS:
        return decode_wide_config.cheapest(wide(problem, residues), problem.target)
    # With batch_invariant the order of sums must not depend on m, so the config must not either.
    model = cost_model(MOST_ROWS, problem.scale_a == "group")
    if count > 1:
        n = pad_channels(n, count // residues, CHANNELS)
        model = residue_cost_model(model, n, count // residues)
    config = cheapest(n, problem.k, model, problem.target)
    if width(problem.m) < 8 * config.multicast_tiles:
        config = without_multicast(config, n)
    config = config._replace(phases=count, residues=residues)
    return config if problem.prefetch_weight else without_prefetch(config, problem.target)


def wide(p: ScaledMm, residues: int) -> decode_wide_config.Wide:
    """Return what the layout of more than 64 rows is chosen by."""
    count = phases_of(p.ldb)
    n = pad_channels(p.n, count // residues, CHANNELS)
    blockwise, spread = is_along_k(p), result_spread(p, residues)
    return decode_wide_config.Wide(p.m, n, p.k, count, residues, spread, blockwise)


def residue_cost_model(model: CostModel, n: int, groups: int) -> CostModel:
    """Return a cost model for tiles of one group of residues, with the candidates that round ``n`` up no further."""
    configs = []
    for config in model.configs:
        tile = config.m_warpgroups, config.k_warpgroups, config.multicast_tiles
        if pad_channels(n, groups, CHANNELS * config.m_warpgroups * config.multicast_tiles) == n:
            configs.append(config._replace(**LOADED[tile]._asdict()))
    small = residue_cost_model(model.small, n, groups) if model.small else None
    return model._replace(configs=tuple(configs), small=small)


def aligning(problem: ScaledMm, config: DecodeConfig) -> Launch:
    """Return the launch of a kernel whose blocks load a by its address and align what they multiply."""
    config, panel = aligned_config(problem, config), decode_unaligned_config.panel_of(problem, config.panels)
    constants = {"FP8_A_VECTORS": 1, "FP8_A_ROWS": loose_batch(panel, config), "FP8_A_INPUT": -1, "FP8_A_MODE": 0}
    launcher, grid = launcher_for(problem, config, LooseArgs, constants)
    a = 0, problem.lda, problem.k, 0.0
    return launcher.bind_args(grid, LooseArgs(b"", *a, CommonArgs.of(problem), 0, 0, problem.beta))


def loading(problem: ScaledMm, config: DecodeConfig) -> Launch:
    """Return the launch of a kernel that loads aligned rows of a by TMA."""
    launcher, grid = launcher_for(problem, config, UnalignedArgs)
    return launcher.bind_args(grid, UnalignedArgs(b"", b"", CommonArgs.of(problem), 0, 0, problem.beta))


def decode_unaligned(problem: ScaledMm, config: DecodeConfig | None = None) -> Matmul:
    """Return the product in one launch; with up to 64 rows it has the bits of `sm90_decode` in the same layout."""
    problem = in_groups(problem)
    config = config or layout(problem)
    panel = decode_unaligned_config.panel_of(problem, config.panels)
    loose = a_is_unaligned(problem) and aligns_a(panel, config)
    copies = a_is_unaligned(problem) and not loose
    multiply = (aligning if loose else loading)(problem, config)
    rows = config.tile // config.residues
    b_maps = shared_maps(UnalignedMaps, problem.n, problem.k, problem.ldb, rows, config.weight_columns)
    tiles = config.multicast_tiles
    rows = width(problem.m) // tiles if tiles > 1 else panel.m
    ld = round_up(problem.k, ALIGNMENT) if copies else problem.lda
    copy = plan_realign(problem._replace(n=0)) if copies else None
    clear = plan_clear_amax(problem.target) if problem.amax and copy is None else None
    a_maps = None if loose else tensor_maps(problem.m, ld if copies else problem.k, ld, rows)

    def launch(
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
        if clear is not None:
            clear(stream, amax)
        if copy is not None:
            copy(stream, a, scratch, 0, 0, amax)
            a = scratch
        given_a = a if a_maps is None else a_maps[a]
        multiply(stream, b_maps[b], given_a, scale_a, scale_b, bias, out, out_scale, amax)

    return ready(launch, scratch_bytes=problem.m * ld if copies else 0, prefetches_weight=True)


def plan_unaligned(problem: ScaledMm) -> Matmul:
    """Return the launches of the row "sm90_decode_unaligned"."""
    several = problem.batch_invariant and problem.m > MOST_ROWS
    return panels(problem, decode_unaligned) if several else decode_unaligned(problem)


UNALIGNED: Final = Requirement(
    lambda p: (
        any(number % ALIGNMENT for number in (max(p.alignment, p.codes_alignment), p.lda, p.ldb))
        or p.out in OCP
        or p.amax
    ),
    "needs rows of codes that are not aligned to 16 bytes, an FP8 result or amax, got codes aligned to"
    " {p.codes_alignment}, {p.out} and amax={p.amax}",
)
SOME_K: Final = Requirement(lambda p: p.k > 0, "needs k > 0, got k={p.k}")
SOME_LAYOUT: Final = Requirement(
    lambda p: (
        p.m <= decode_wide_config.MOST_ROWS or p.batch_invariant or decode_unaligned_config.cheapest(p) is not None
    ),
    f"needs at most {decode_wide_config.MOST_ROWS} rows, batch_invariant, or a weight so small that there are"
    " multiprocessors for every panel of 64 rows, got m={p.m} n={p.n} k={p.k}",
)
COPYABLE: Final = Requirement(
    lambda p: (MOST_ROWS if p.batch_invariant else p.m) * round_up(p.k, ALIGNMENT) < ALIGNMENT << 31,
    "needs a of less than 2**35 codes (with batch_invariant, in each 64 rows), as it counts the 16-byte words of its"
    " copy in 32 bits, got m={p.m} k={p.k}",
)
ONE_LAUNCH_AMAX: Final = Requirement(
    lambda p: not (p.amax and p.batch_invariant),
    f"takes no amax with batch_invariant, as it takes more than {MOST_ROWS} rows in several launches then",
)

SM90_DECODE_UNALIGNED: Final = Kernel(
    "sm90_decode_unaligned",
    (
        CUDA,
        supports("wgmma"),
        UNALIGNED,
        OCP_FORMATS,
        MIXED_SCALES,
        FLOAT32_SCALES,
        OCP_RESULT,
        SOME_K,
        COUNTABLE,
        COPYABLE,
        SOME_LAYOUT,
        ONE_LAUNCH_AMAX,
        WHOLE_ELEMENTS,
        WHOLE_WORDS,
    ),
    plan_unaligned,
)
"""The row of `scaled_mm` for few rows at any address on Hopper."""
