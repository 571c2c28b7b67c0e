"""Convert between text and tokens: the tokenizer, chat templates, stop strings and output parsing. No torch."""
