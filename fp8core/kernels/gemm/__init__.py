"""Scaled matrix products: the rows of `scaled_mm`, by what they run on."""
