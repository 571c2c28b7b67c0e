"""Operations that take and return tensors. `triton/` has the GPU kernels and `eager/` has a twin of each in plain torch."""
