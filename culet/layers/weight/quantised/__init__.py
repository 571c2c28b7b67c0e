"""Quantised weights: their forms in memory, their sources in checkpoints, and the choice of both for each weight."""
