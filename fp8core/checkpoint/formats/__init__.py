"""What the formats of checkpoints write: names of tensors, shapes of scales, and configuration."""
