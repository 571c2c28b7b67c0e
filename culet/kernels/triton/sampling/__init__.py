"""Draw tokens from logits."""
