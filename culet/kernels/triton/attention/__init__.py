"""Attention kernels over the paged cache."""
