"""Products of few rows on sm_90a: the weight is streamed at memory bandwidth (``cuda_src/gemm/sm90/decode*.cu``).

Everything that a launch needs, except the tensor maps, follows from arithmetic on the problem (`decode_config`).
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import FORMAT, RESULT, TYPE, ceil_div
from fp8core.kernels.gemm.args import Matmul, ScaledArgs, ending, ready, ready_kernel
from fp8core.kernels.gemm.requirements import (
    CODES_AT_16,
    COUNTABLE,
    FLOAT32_SCALES,
    MIXED_SCALES,
    OCP_FORMATS,
    STRIDES_OF_16,
    WHOLE_ELEMENTS,
    WHOLE_WORDS,
    WIDE_RESULT,
    few_rows,
)
from fp8core.kernels.gemm.scales import in_groups
from fp8core.kernels.gemm.sm90.decode_channels_config import cheapest, cost_model
from fp8core.kernels.gemm.sm90.decode_config import (
    AHEAD_FROM,
    BLOCK_K,
    MOST_ROWS,
    DecodeConfig,
    dynamic_bytes,
    stages,
    width,
    without_multicast,
    without_prefetch,
)
from fp8core.kernels.gemm.sm90.decode_rows_config import FEWEST_ROWS, full_config
from fp8core.kernels.gemm.sm90.tensor_maps import tensor_maps
from fp8core.kernels.requirements import CUDA, supports
from fp8core.problem import BLOCK, ScaledMm
from fp8core.runtime import jit, launches
from fp8core.runtime.args import Float32, Int32, TensorMap
from fp8core.table import Kernel

SCALE_ROWS: Final = {"block": BLOCK, "group": 1}
"""Channels that share a scale of the weight, if scales change along k."""


class CommonArgs(NamedTuple):
    """The arguments of sm90_decode and sm90_tiled that follow the operands."""

    scaled: ScaledArgs
    m: Int32
    n: Int32
    k_blocks: Int32
    prefetch_weight: Int32

    @classmethod
    def of(cls, p: ScaledMm) -> "CommonArgs":
        """Return the arguments of a problem; each launch fills in the addresses."""
        return cls(ScaledArgs.of(p), p.m, p.n, ceil_div(p.k, BLOCK_K), int(p.prefetch_weight))


class Sm90Args(NamedTuple):
    """The arguments of sm90_decode and sm90_decode_rows if TMA loads codes of a."""

    weight_map: TensorMap
    a_map: TensorMap
    common: CommonArgs
    beta: Float32


def config_for(problem: ScaledMm) -> DecodeConfig:
    """Return how a product is laid out on the multiprocessors."""
    problem = in_groups(problem)
    blocks = problem.scale_a == "group"
    if problem.m >= FEWEST_ROWS and not problem.batch_invariant and problem.scale_b != "group":
        config = full_config(problem.n, problem.k, problem.target, blocks)
        return config if problem.prefetch_weight else without_prefetch(config, problem.target)
    # With batch_invariant the order of sums must not depend on m, so the config must not either.
    side = MOST_ROWS if problem.batch_invariant else width(problem.m)
    config = cheapest(problem.n, problem.k, cost_model(side, blocks), problem.target)
    if width(problem.m) < 8 * config.multicast_tiles:
        config = without_multicast(config, problem.n)
    return config if problem.prefetch_weight else without_prefetch(config, problem.target)


def a_side(problem: ScaledMm, config: DecodeConfig) -> int:
    """Return how many rows of a wgmma takes: 64 on its M side, on its N side the least width that holds a panel's."""
    return MOST_ROWS if config.rows_first else width(ceil_div(problem.m, config.panels))


def launcher_for(
    problem: ScaledMm, config: DecodeConfig, args: type, quantizer: Mapping[str, int] | None = None
) -> tuple[launches.Launcher, launches.Dim3]:
    """Return the compiled kernel and its grid; ``quantizer``: A_* constants if blocks write codes of a themselves."""
    side, scale_rows = a_side(problem, config), SCALE_ROWS.get(problem.scale_b, 0)
    blockwise, depth = problem.scale_a == "group", stages(config, side, scale_rows, problem.target)
    if config.rows_first:
        name, layout = "decode_rows", {"FP8_CHANNELS": config.warpgroup_channels}
    else:
        name = "decode"
        layout = {
            "FP8_WIDTH": side,
            "FP8_M_WARPGROUPS": config.m_warpgroups,
            "FP8_K_WARPGROUPS": config.k_warpgroups,
            "FP8_CTAS_PER_SM": config.ctas_per_sm,
            "FP8_SCALE_ROWS": scale_rows or BLOCK,
            "FP8_PHASES": config.phases,
            "FP8_RESIDUES": config.residues,
            "FP8_AMAX": int(problem.amax),
            **(quantizer or {"FP8_A_VECTORS": 0, "FP8_A_ROWS": 0, "FP8_A_INPUT": 0, "FP8_A_MODE": 0}),
        }
    launcher = jit.prepare(
        problem.target,
        f"gemm/sm90/{name}",
        f"sm90_{name}",
        {
            **layout,
            "FP8_SPLIT_K": config.split_k,
            "FP8_MULTICAST_TILES": config.multicast_tiles,
            "FP8_STAGES": depth,
            "FP8_A_STAGES": config.a_stages,
            "FP8_A_TYPE": FORMAT[problem.a],
            "FP8_B_TYPE": FORMAT[problem.b],
            "FP8_BLOCKWISE": int(blockwise),
            "FP8_OUT": RESULT[problem.out],
            "FP8_BIAS": TYPE[problem.bias] if problem.bias else -1,
            "FP8_PREFETCH_K_BLOCKS": config.prefetch_k_blocks,
            "FP8_AHEAD_K_BLOCKS": config.ahead_k_blocks if problem.n * problem.k >= AHEAD_FROM else 0,
            "FP8_KEEPS_RESULT": int(config.keeps_result),
            **ending(problem),
        },
        args,
        block=128 * config.m_warpgroups * config.k_warpgroups + 64 + 32 * blockwise,
        shared_bytes=dynamic_bytes(config, side, scale_rows, depth, problem.target),
        cluster=config.cluster,
        programmatic=True,
    )
    return launcher, (config.cluster * config.clusters, config.panels, 1)


def decode(problem: ScaledMm, config: DecodeConfig | None = None) -> Matmul:
    """Return one launch for up to 64 rows: ``round(scale_a * (scale_b * acc) + bias)``.

    Scales that change along k are applied after every k-block of 128.
    """
    problem = in_groups(problem)
    config = config or config_for(problem)
    launcher, grid = launcher_for(problem, config, Sm90Args)
    launch = launcher.bind_args(grid, Sm90Args(b"", b"", CommonArgs.of(problem), problem.beta))
    weight_maps = tensor_maps(problem.n, problem.k, problem.ldb, config.tile)
    tiles = config.multicast_tiles
    rows = a_side(problem, config) // tiles if tiles > 1 else problem.m
    a_maps = tensor_maps(problem.m, problem.k, problem.lda, rows)
    return ready_kernel(launch, a_maps=a_maps, b_maps=weight_maps)


def panels(problem: ScaledMm, plan: Callable[[ScaledMm], Matmul] = decode) -> Matmul:
    """Return launches of up to 64 rows by ``plan``, which give each row the bits that it has alone.

    Every launch reads the whole weight.
    """
    full, rest = divmod(problem.m, MOST_ROWS)
    sizes = [MOST_ROWS] * full + [rest] * (rest > 0)
    plans = {rows: plan(problem._replace(m=rows)) for rows in set(sizes)}
    launches = [(MOST_ROWS * i, plans[rows]) for i, rows in enumerate(sizes)]
    a_row, scale_row, out_row = problem.lda, 4 * problem.scale_a_strides[0], problem.ldo * ITEMSIZE[problem.out]

    def launch(stream: int, a: int, b: int, scale_a: int, scale_b: int, bias: int, out: int, *others: int) -> None:
        for row, panel in launches:
            places = (a + row * a_row, b, scale_a + row * scale_row, scale_b, bias, out + row * out_row)
            panel(stream, *places, *others)

    scratch_bytes = max(plan.scratch_bytes for plan in plans.values())
    return ready(launch, scratch_bytes=scratch_bytes, prefetches_weight=True)


def plan_decode(problem: ScaledMm) -> Matmul:
    """Return the launch of the row "sm90_decode"."""
    return decode(problem) if problem.m <= MOST_ROWS else panels(problem)


SM90_DECODE: Final = Kernel(
    "sm90_decode",
    (
        CUDA,
        supports("wgmma"),
        OCP_FORMATS,
        MIXED_SCALES,
        FLOAT32_SCALES,
        WIDE_RESULT,
        CODES_AT_16,
        STRIDES_OF_16,
        COUNTABLE,
        WHOLE_ELEMENTS,
        WHOLE_WORDS,
    ),
    plan_decode,
    (few_rows(MOST_ROWS),),
)
"""The row of `scaled_mm` for few rows on Hopper."""
