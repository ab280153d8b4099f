"""Linear layers of few rows on sm_90a in one launch: sm90_decode quantizes its rows itself.

The weight streams as in a product of given codes. Every block computes the scales itself, from all of x, and keeps the
codes of its part of k, so that several tiles cost no more than one. The limit is that every block reads all of x: for
a larger x, a separate quantization is faster.
"""

from typing import Final, NamedTuple

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import TYPE, ceil_div, mode_of, power_of_two
from fp8core.kernels.gemm.args import Matmul, ready_kernel
from fp8core.kernels.gemm.requirements import ROW_SCALES
from fp8core.kernels.gemm.sm90.decode import CommonArgs, config_for, launcher_for
from fp8core.kernels.gemm.sm90.decode_config import (
    BLOCK_K,
    LEAST_STAGES,
    DecodeConfig,
    holds,
    linear_config,
    width,
)
from fp8core.kernels.gemm.sm90.tensor_maps import tensor_maps
from fp8core.kernels.quantize.configs import VEC8
from fp8core.problem import PER_TOKEN, Linear
from fp8core.runtime.args import Float32, Int32, Int64, Pointer, TensorMap
from fp8core.table import Requirement

MOST_ELEMENTS: Final = 8192
"""Elements of x up to which one launch is faster; twice as many for a single row (experiments/2026-11-decode)."""
MOST_VECTORS: Final = 16
"""The most vectors of 8 elements of x that a thread holds."""


class FusedArgs(NamedTuple):
    """The arguments of sm90_decode for rows in 16 bits; x_stride in bytes, x_vecs: vectors of 8 elements of a row."""

    weight_map: TensorMap
    x: Pointer
    x_stride: Int64
    x_vecs: Int32
    upper: Float32
    common: CommonArgs
    beta: Float32


def fused_config(problem: Linear) -> DecodeConfig:
    """Return the config for one launch: that for two launches, to get the same bits, with room for a block's codes."""
    config = linear_config(config_for(problem.product))
    return config._replace(a_stages=ceil_div(ceil_div(problem.product.k, BLOCK_K), config.split_k))


def row_teams(problem: Linear) -> int:
    """Return the number of teams, one per row, into which the threads of a block are divided: a power of two."""
    return power_of_two(problem.product.m)


def vectors(problem: Linear) -> int:
    """Return how many vectors of x a thread holds: of its block's part of k, or of all of k to find the amax."""
    config = fused_config(problem)
    k_blocks = config.a_stages if problem.quantize.static else ceil_div(problem.product.k, BLOCK_K)
    threads = 128 * config.m_warpgroups * config.k_warpgroups
    return ceil_div(k_blocks * BLOCK_K // VEC8, threads // row_teams(problem))


def plan_fused(problem: Linear) -> Matmul:
    """Return one launch, called as a `MatmulLaunch`: a is the address of x, and scale_a is read only if it is given."""
    quantize, p, config = problem.quantize, problem.product, fused_config(problem)
    quantizer = {
        "FP8_A_VECTORS": vectors(problem),
        "FP8_A_ROWS": row_teams(problem),
        "FP8_A_INPUT": TYPE[quantize.x],
        "FP8_A_MODE": mode_of(quantize),
    }
    launcher, grid = launcher_for(p, config, FusedArgs, quantizer)
    assert problem.scale_ub is not None
    x = 0, problem.x_stride * ITEMSIZE[quantize.x], quantize.cols // VEC8, problem.scale_ub
    launch = launcher.bind_args(grid, FusedArgs(b"", *x, CommonArgs.of(p), p.beta))
    return ready_kernel(launch, b_maps=tensor_maps(p.n, p.k, p.ldb, config.tile))


SIXTEEN_BITS: Final = Requirement(
    lambda p: p.quantize.x in ("float16", "bfloat16") and p.quantize.alignment >= 16,
    "needs x of float16 or bfloat16 in rows aligned to 16 bytes, got {p.quantize.x} aligned to {p.quantize.alignment}",
)
WHOLE_VECTORS: Final = Requirement(
    lambda p: p.quantize.cols % VEC8 == 0,
    f"needs columns in a multiple of {VEC8}, as threads load whole vectors, got {{p.quantize.cols}}",
)
SOME_CHANNELS: Final = Requirement(
    lambda p: p.product.n > 0, "needs n > 0, as blocks divide the channels, got n={p.product.n}"
)
TOKEN_SCALES: Final = Requirement(
    lambda p: ROW_SCALES.check(p.product) is None and (p.quantize.static or p.quantize.group_shape == PER_TOKEN),
    "needs scales per token, or given ones per tensor or token, and scales of b per tensor or channel, got"
    " {p.quantize.group_shape} and scale_b per {p.product.scale_b}",
)
BOUND_BY_VALUE: Final = Requirement(lambda p: p.scale_ub is not None, "takes scale_ub as a number, got an array")
FEW_ELEMENTS: Final = Requirement(
    lambda p: p.product.m * p.product.k <= MOST_ELEMENTS * (1 + (p.product.m == 1)),
    f"measured slower for a larger x, as every block reads all of it: preferred up to {MOST_ELEMENTS} elements, or"
    " twice as many in one row; got {p.product.m} x {p.product.k}",
)


def _fits(problem: Linear) -> bool:
    config, p = fused_config(problem), problem.product
    fewest = LEAST_STAGES * config.k_warpgroups
    return vectors(problem) <= MOST_VECTORS and holds(config, width(p.m), 0, fewest, p.target)


FITS: Final = Requirement(
    _fits,
    "needs registers for the elements of x and shared memory for the codes of a block's part of k,"
    " got {p.product.m} x {p.product.k}",
)
BLOCKS_QUANTIZE: Final = Requirement(
    lambda p: not fused_config(p).rows_first,
    "needs a layout of sm90_decode, whose blocks can quantize, got one of sm90_decode_rows for {p.product.m} x"
    " {p.product.k}",
)
