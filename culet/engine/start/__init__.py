"""Start an engine: build its worker, and everything around the worker."""
