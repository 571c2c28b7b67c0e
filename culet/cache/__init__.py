"""The KV cache: what a page is (spec), who holds it (arena, prefix), and the tensors (pool)."""
