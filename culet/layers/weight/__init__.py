"""Weights: their bytes, their place in a checkpoint, their shard for a rank, and the ops that read them.

`base` says what a weight can do, `weights` makes the weights of a model, and each other file is a format.
"""
