"""The engine's process and how the server talks to it."""
