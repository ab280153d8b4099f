"""The files of checkpoints: read by offset, and created atomically."""
