"""Benchmarks of fp8core: `python -m bench --help`."""
