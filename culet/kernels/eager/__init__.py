"""Every op in plain torch. These are the specification that the GPU kernels are tested against."""
