"""Norms, q/k/v preparation and other small fused ops."""
