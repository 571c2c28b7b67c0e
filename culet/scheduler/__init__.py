"""Which tokens are computed in which step: pure Python, no torch."""
