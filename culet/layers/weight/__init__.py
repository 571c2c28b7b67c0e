"""Weights: their bytes, their names in a checkpoint, their shard for a rank, and the ops that read them.

`base` defines the interface of a weight, and `weights` makes the weights of a model. `placement` describes where the tensors of
a checkpoint go. Each other file is a format.
"""
