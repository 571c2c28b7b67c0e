"""The engine process and its connection to the web process."""
