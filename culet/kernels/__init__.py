"""Operations: tensors in, tensors out. `triton/` has the GPU kernels, `eager/` a twin of each in plain torch."""
