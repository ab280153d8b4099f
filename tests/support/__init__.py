"""Helpers that tests share: engines, oracles, problems, compilers, the emulator."""
