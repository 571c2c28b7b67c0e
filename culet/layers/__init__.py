"""Modules that decoders are made of."""
