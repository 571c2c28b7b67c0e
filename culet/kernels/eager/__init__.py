"""Every op in plain torch. These ops are the specification that the GPU kernels are tested against."""
