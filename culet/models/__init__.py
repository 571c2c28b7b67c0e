"""Gemma 4: what a checkpoint is (spec), the decoder (gemma4), and how its tensors are loaded (weights)."""
