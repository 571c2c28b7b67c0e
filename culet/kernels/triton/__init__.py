"""GPU kernels in Triton and Gluon. Each op has an eager twin of the same name and signature in `kernels/eager`."""
