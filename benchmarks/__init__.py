"""Scripts that measure, listed in README.md. `python -m benchmarks.NAME` runs one from a checkout's root."""
