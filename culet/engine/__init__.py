"""The loop, text in and out, and the offline API."""
