"""Speculative drafters."""
