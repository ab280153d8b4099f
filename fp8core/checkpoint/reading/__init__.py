"""What a checkpoint holds: its layers, their numbers, and its faults."""
