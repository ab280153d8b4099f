"""Converts FP8 checkpoints."""
