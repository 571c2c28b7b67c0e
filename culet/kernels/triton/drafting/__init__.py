"""Drafting kernels: the parts of a draft round and of its verify that are not layers."""
