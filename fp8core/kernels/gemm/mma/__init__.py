"""Products by FP8 mma.sync: sm_89, sm_12x."""
