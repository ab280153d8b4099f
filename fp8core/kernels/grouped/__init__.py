"""The kernels of the grouped product: those of the product, with a tile scheduler that reads where groups end."""
