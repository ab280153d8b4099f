"""Targets of devices that need not be present."""

from fp8core import Target

H200 = Target("cuda", 90, 0, 132, 32, 232_448)
ADA = Target("cuda", 89, 0, 128, 32, 101_376)
AMPERE = Target("cuda", 80, 0, 108, 32, 166_912)
MI300 = Target("hip", 0x942, 0, 304, 64, 65_536)
MI250 = Target("hip", 0x90A, 0, 104, 64, 65_536)
