"""Linear layers: a quantization and a product, apart, overlapped or fused."""
