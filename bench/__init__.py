"""The benchmark: `python -m bench`. What it measures and how is told in docs/benchmark.md."""
