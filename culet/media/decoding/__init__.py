"""What runs in the decoding processes: bytes that nobody trusts become pixels, samples and features."""
