"""What a drafting round and its verify need besides layers."""
