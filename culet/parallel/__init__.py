"""Ranks, groups and collectives; no-ops at size 1."""
