"""How ranks add their terms of a sum: what can be left to a reader, how GPUs do it, and what they are able to do."""
