"""Triton kernels, sm_80 to sm_120. Each has an eager twin of the same name and signature in `kernels/reference*.py`."""
