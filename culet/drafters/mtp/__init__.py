"""MTP drafters, which Google publishes as assistants. They read the target's pages."""
