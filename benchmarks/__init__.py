"""Benchmarks that the project's developers run from a checkout: `./run bench`, or `python -m benchmarks`."""
