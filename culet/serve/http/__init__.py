"""Connections: what a client may send, how much, and for how long."""
