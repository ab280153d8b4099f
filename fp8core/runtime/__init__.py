"""The device, the run-time compiler, its cache on disk, and launches with plain numbers."""
