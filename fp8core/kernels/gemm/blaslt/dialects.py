"""cuBLASLt and hipBLASLt as two rows of names and numbers.

The functions of the two take the same arguments in the same order; this file has what differs. Numbers are those of
cublasLt.h (the same from 12.9 to 13.10) and of hipblaslt.h (ROCm 6.2 to 10).
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from fp8core.target import Platform

ScaleMode = Literal["SCALAR", "OUTER_VEC", "VEC128", "BLK128x128"]

SCALE_MODES: Final[dict[ScaleMode, int]] = {"SCALAR": 0, "OUTER_VEC": 3, "VEC128": 4, "BLK128x128": 5}
EPILOGUE_DEFAULT: Final = 1
EPILOGUE_BIAS: Final = 4
EPILOGUE_GELU: Final = 32
"""The tanh approximation of GELU; combined with the bit of the bias if there is one."""
SCALE_TYPE: Final = 0
"""CUDA_R_32F and HIP_R_32F: alpha, beta and the scales are fp32."""

WIDTHS: Final[dict[str, str]] = {
    "TRANSA": "i",
    "TRANSB": "i",
    "EPILOGUE": "I",
    "BIAS_POINTER": "Q",
    "A_SCALE_POINTER": "Q",
    "B_SCALE_POINTER": "Q",
    "D_SCALE_POINTER": "Q",
    "AMAX_D_POINTER": "Q",
    "FAST_ACCUM": "b",
    "BIAS_DATA_TYPE": "i",
    "A_SCALE_MODE": "i",
    "B_SCALE_MODE": "i",
    "MAX_WORKSPACE_BYTES": "Q",
    "MIN_ALIGNMENT_A_BYTES": "I",
    "MIN_ALIGNMENT_B_BYTES": "I",
    "MIN_ALIGNMENT_C_BYTES": "I",
    "MIN_ALIGNMENT_D_BYTES": "I",
}
"""The `struct` format of each attribute: the libraries refuse a value of another width."""


class Dialect(NamedTuple):
    """The names and numbers of one of the libraries."""

    name: str
    prefix: str
    platform: Platform
    sonames: tuple[str, ...]
    """The library's file names, the preferred one first."""
    folders: tuple[str, ...]
    """Where wheels have it, below a folder of sys.path."""
    where: str
    """The text after "was not found": where it was searched for."""
    statuses: Mapping[int, str]
    failures: tuple[int, ...]
    """The statuses that say nothing about a product: too little memory, a device that fails. A library that cannot be
    initialized, as by a driver that is too old for it, is none: other kernels run its products."""
    types: Mapping[str, int]
    compute_32f: int
    operation_n: int
    operation_t: int
    attributes: Mapping[str, int]
    """Attributes of a product's descriptor; those that a library lacks are missing here and are not set."""
    preferences: Mapping[str, int]
    algorithm_bytes: int
    result_bytes: int
    """Bytes of a heuristic result: algorithm, workspace (size_t), status (int), waves (float), reserved words."""
    addend: bool
    """Whether C, which is not read, is described like D and gets its address. hipBLASLt needs an address, and its
    kernels (Tensile) take only C and D of one type. cuBLASLt refuses an FP8 C, and D's address if the types differ."""
    workspace_bytes: int
    """The most workspace offered to an algorithm, as the vendor recommends (NVIDIA for sm_90, AMD for hipBLASLt)."""
    handle_a_stream: bool
    """Whether every stream needs its own handle, and the first launch of a kernel loads its code."""
    minimum_versions: Mapping[ScaleMode, int]
    """The first version (as GetVersion counts) that has a scale mode."""


CUBLASLT: Final = Dialect(
    name="cuBLASLt",
    prefix="cublasLt",
    platform="cuda",
    sonames=("libcublasLt.so.13", "libcublasLt.so.12"),
    folders=("nvidia/cu13/lib", "nvidia/cublas/lib"),
    where="",
    statuses={
        0: "CUBLAS_STATUS_SUCCESS",
        1: "CUBLAS_STATUS_NOT_INITIALIZED",
        3: "CUBLAS_STATUS_ALLOC_FAILED",
        7: "CUBLAS_STATUS_INVALID_VALUE",
        8: "CUBLAS_STATUS_ARCH_MISMATCH",
        11: "CUBLAS_STATUS_MAPPING_ERROR",
        13: "CUBLAS_STATUS_EXECUTION_FAILED",
        14: "CUBLAS_STATUS_INTERNAL_ERROR",
        15: "CUBLAS_STATUS_NOT_SUPPORTED",
        16: "CUBLAS_STATUS_LICENSE_ERROR",
    },
    failures=(3, 11, 13),
    types={"float32": 0, "float16": 2, "bfloat16": 14, "float8_e4m3fn": 28, "float8_e5m2": 29},
    compute_32f=68,
    operation_n=0,
    operation_t=1,
    attributes={
        "TRANSA": 3,
        "TRANSB": 4,
        "EPILOGUE": 7,
        "BIAS_POINTER": 8,
        "A_SCALE_POINTER": 17,
        "B_SCALE_POINTER": 18,
        "D_SCALE_POINTER": 20,
        "AMAX_D_POINTER": 21,
        "FAST_ACCUM": 25,
        "BIAS_DATA_TYPE": 26,
        "A_SCALE_MODE": 31,
        "B_SCALE_MODE": 32,
    },
    preferences={
        "MAX_WORKSPACE_BYTES": 1,
        "MIN_ALIGNMENT_A_BYTES": 5,
        "MIN_ALIGNMENT_B_BYTES": 6,
        "MIN_ALIGNMENT_C_BYTES": 7,
        "MIN_ALIGNMENT_D_BYTES": 8,
    },
    algorithm_bytes=64,
    result_bytes=96,
    addend=False,
    workspace_bytes=32 << 20,
    handle_a_stream=False,
    minimum_versions={"SCALAR": 120000, "OUTER_VEC": 120900, "VEC128": 120900, "BLK128x128": 120900},
)

HIPBLASLT: Final = Dialect(
    name="hipBLASLt",
    prefix="hipblasLt",
    platform="hip",
    sonames=("libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"),
    folders=(),
    where=" beside the HIP runtime that is loaded",
    statuses={
        0: "HIPBLAS_STATUS_SUCCESS",
        1: "HIPBLAS_STATUS_NOT_INITIALIZED",
        2: "HIPBLAS_STATUS_ALLOC_FAILED",
        3: "HIPBLAS_STATUS_INVALID_VALUE",
        4: "HIPBLAS_STATUS_MAPPING_ERROR",
        5: "HIPBLAS_STATUS_EXECUTION_FAILED",
        6: "HIPBLAS_STATUS_INTERNAL_ERROR",
        7: "HIPBLAS_STATUS_NOT_SUPPORTED",
        8: "HIPBLAS_STATUS_ARCH_MISMATCH",
        9: "HIPBLAS_STATUS_HANDLE_IS_NULLPTR",
        10: "HIPBLAS_STATUS_INVALID_ENUM",
        11: "HIPBLAS_STATUS_UNKNOWN",
    },
    failures=(2, 4, 5),
    types={
        "float32": 0,
        "float16": 2,
        "bfloat16": 14,
        "float8_e4m3fn": 28,
        "float8_e5m2": 29,
        "float8_e4m3fnuz": 1000,
        "float8_e5m2fnuz": 1001,
    },
    compute_32f=2,
    operation_n=111,
    operation_t=112,
    attributes={
        "TRANSA": 0,
        "TRANSB": 1,
        "EPILOGUE": 2,
        "BIAS_POINTER": 3,
        "BIAS_DATA_TYPE": 4,
        "A_SCALE_POINTER": 5,
        "B_SCALE_POINTER": 6,
        "D_SCALE_POINTER": 8,
        "AMAX_D_POINTER": 14,
        "A_SCALE_MODE": 31,
        "B_SCALE_MODE": 32,
    },
    preferences={"MAX_WORKSPACE_BYTES": 1},
    algorithm_bytes=24,
    result_bytes=56,
    addend=True,
    workspace_bytes=76 << 20,
    handle_a_stream=True,
    minimum_versions={},
)

DIALECTS: Final[dict[Platform, Dialect]] = {d.platform: d for d in (CUBLASLT, HIPBLASLT)}
