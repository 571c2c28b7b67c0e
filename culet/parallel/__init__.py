"""Ranks, and where their partial sums meet. One rank is the default and costs nothing."""
