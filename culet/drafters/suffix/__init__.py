"""Suffix drafting: copy what followed the last tokens when they occurred before in the same sequence."""
