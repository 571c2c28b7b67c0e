"""One module per HTTP API."""
