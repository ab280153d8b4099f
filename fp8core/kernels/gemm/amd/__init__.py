"""Products by the FP8 matrix instructions of AMD GPUs."""
