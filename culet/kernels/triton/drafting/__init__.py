"""Drafting kernels. They are the parts of a draft round and of its verification that are not layers."""
