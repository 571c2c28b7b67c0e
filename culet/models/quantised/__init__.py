"""Quantised checkpoints: what their config says, which format each weight has, and how to write one."""
