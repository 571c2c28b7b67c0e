"""The engine: how it is built, its loop, and the offline API."""
