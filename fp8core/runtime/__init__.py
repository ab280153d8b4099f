"""The device, the run-time compiler, the kernel cache on disk, and launches with plain numbers."""
