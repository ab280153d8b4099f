"""Kernels that bring the rows of tokens into the order of their experts, and back."""

from fp8core.kernels.moe.permute import MOE_PERMUTE, counts_bytes, most_counts_bytes
from fp8core.kernels.moe.unpermute import MOE_UNPERMUTE

__all__ = ["MOE_PERMUTE", "MOE_UNPERMUTE", "counts_bytes", "most_counts_bytes"]
