"""Linear layers: kernels for few tokens, and those for many that do more than cuBLAS."""
