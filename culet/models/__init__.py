"""Gemma 4: the facts of a checkpoint (spec), the decoder (gemma4), and the loading of its tensors (weights)."""
