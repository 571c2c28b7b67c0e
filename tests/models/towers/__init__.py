"""Towers compared with transformers on tiny checkpoints, and their traps."""
