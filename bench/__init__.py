"""The benchmark: `python -m bench`. docs/benchmark.md describes what it measures and how."""
