"""Attention: who serves which group of layers and why (plan), the step's data (batch), one file per backend."""
