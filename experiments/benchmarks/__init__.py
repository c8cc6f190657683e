"""Benchmarks: `python -m experiments.benchmarks.NAME` prints a table and one JSON line."""
