"""Benchmarks: each module runs by itself, as `python -m bench.NAME`."""
