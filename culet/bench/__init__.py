"""`culet bench`: the benchmarks that users run."""
