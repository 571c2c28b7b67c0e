"""Small random checkpoints and a scripted engine, for tests and benchmarks."""
