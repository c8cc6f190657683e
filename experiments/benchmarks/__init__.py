"""Speed, measured: `python -m experiments.benchmarks.NAME`, each a table and one JSON line."""
