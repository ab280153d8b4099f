"""Quantizes checkpoints."""
