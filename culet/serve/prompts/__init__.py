"""From messages and texts of clients to token ids and media."""
