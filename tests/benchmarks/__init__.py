"""The benchmarks and their reports."""
