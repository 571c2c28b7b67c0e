"""OpenAI's APIs: chat, completions and responses."""
