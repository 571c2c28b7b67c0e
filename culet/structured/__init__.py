"""Structured output: what an answer must look like."""
