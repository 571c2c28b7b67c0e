"""Attention. `plan` chooses a backend for each KV group, `batch` holds a step's data, and each backend has its own file."""
