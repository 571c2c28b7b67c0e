"""The layers that decoders are built from."""
