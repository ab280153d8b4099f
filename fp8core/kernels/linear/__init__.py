"""Linear layers: a quantization and a product, sequential, overlapped or fused."""
