"""The router and the experts of MoE models."""
