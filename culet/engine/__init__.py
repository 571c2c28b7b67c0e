"""The engine: building it, its loop, and the offline API."""
