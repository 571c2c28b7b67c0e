"""Ranks, and the place where their partial sums are added. The default is one rank, which costs nothing."""
