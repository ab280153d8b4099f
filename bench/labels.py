"""The labels in tables and plots for the names in records: variants, modes, kinds of products and layers."""

from typing import Final

DECODE: Final = "sm90_decode"
BLOCK: Final = "sm90_tiled"
LIBRARY: Final = "cublaslt"
"""The rows of fp8core's table that the records of products name; the last one calls cuBLASLt."""
BASELINES: Final = ("torch", "vllm", "sgl", "deep_gemm", "sgl_deep_gemm", "flashinfer")
LABELS: Final = {
    "fp8core": "fp8core",
    DECODE: "fp8core kernel",
    BLOCK: "fp8core kernel",
    LIBRARY: "cuBLASLt",
    "copy": "copy",
    "vllm": "vLLM",
    "sgl": "SGLang",
    "torch": "torch",
    "torch.compile": "torch.compile",
    "triton": "Triton",
    "neighbour": "neighbour",
    "deep_gemm": "DeepGEMM",
    "sgl_deep_gemm": "SGLang's DeepGEMM",
    "flashinfer": "FlashInfer",
    "contiguous": "DeepGEMM, contiguous",
    "masked": "DeepGEMM, masked",
}
MODES: Final = {
    "static": "static",
    "tensor": "per tensor",
    "token": "per token",
    "1x128": "1x128",
    "1x128 mn": "1x128, scales m-major",
    "128x128": "128x128",
}
PRODUCTS: Final = {"tensor": "per tensor", "row": "per token x per channel", "block": "1x128 x 128x128"}
LAYER: Final = {
    "preallocated": "fp8core, given memory",
    "plain": "fp8core, plain calls",
    "vllm": "vLLM's kernels",
    "torch": "torch, bfloat16",
}
GROUPED: Final = ("fp8core", "torch", "vllm", "contiguous", "masked")
"""Grouped products: DeepGEMM has a kernel for each of two layouts of rows."""
MOE: Final = ("fp8core", "sgl", "torch")
"""Routing of mixtures of experts."""
OPERATIONS: Final = {"permute": "`moe_permute`", "unpermute": "`moe_unpermute`"}
EXPERTS: Final = {"bf16": "bfloat16", "loop": "FP8, one by one", "fp8core": "FP8, grouped"}
KINDS: Final = {"norm": "RMS norm", "add+norm": "add + RMS norm", "silu": "SiLU · mul"}
