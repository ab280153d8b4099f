"""The kernels of the scaled product, most preferred first."""

from typing import Final

from fp8core.kernels.gemm.amd.decode import GFX9_DECODE
from fp8core.kernels.gemm.blaslt.rows import CUBLASLT_ROWS, HIPBLASLT_ROWS
from fp8core.kernels.gemm.generic import GENERIC_DECODE, GENERIC_MMA, HOST
from fp8core.kernels.gemm.mma.decode import SM89_DECODE
from fp8core.kernels.gemm.realigned import realigned
from fp8core.kernels.gemm.sm90.decode import SM90_DECODE
from fp8core.kernels.gemm.sm90.decode_unaligned import SM90_DECODE_UNALIGNED
from fp8core.kernels.gemm.sm90.tiled import SM90_TILED
from fp8core.problem import ScaledMm
from fp8core.table import Table

ALIGNED: Final = (SM90_DECODE, SM90_TILED, SM89_DECODE, *CUBLASLT_ROWS, GFX9_DECODE, *HIPBLASLT_ROWS)
"""Rows that need operands in aligned rows."""
REALIGNED: Final = realigned(ALIGNED)
SCALED_MM: Final = Table(
    "scaled_mm", ScaledMm, *ALIGNED, SM90_DECODE_UNALIGNED, REALIGNED, GENERIC_DECODE, GENERIC_MMA, HOST
)
"""The rows of `scaled_mm`; a plan is a `fp8core.kernels.gemm.args.Matmul`."""
