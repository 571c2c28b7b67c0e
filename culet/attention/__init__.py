"""Attention: which backend serves which KV group and why (plan), a step's data (batch), one file per backend."""
