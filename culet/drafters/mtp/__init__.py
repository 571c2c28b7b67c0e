"""MTP assistants: they read the target's pages."""
