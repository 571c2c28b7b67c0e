"""The benchmarks a user runs."""
