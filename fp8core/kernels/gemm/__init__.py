"""Scaled matrix products: the rows of `scaled_mm`, by the hardware or library that they use."""
