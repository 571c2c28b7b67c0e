"""The engine process, and how the web process talks to it."""
