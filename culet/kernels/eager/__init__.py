"""Every op in plain torch: the specification that the GPU kernels are tested against."""
