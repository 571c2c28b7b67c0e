"""The KV cache. `spec` defines pages, `arena` and `prefix` track who holds them, and `pool` has the tensors."""
