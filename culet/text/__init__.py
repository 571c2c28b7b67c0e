"""Text in and out: tokenizer, chat template, stop strings, and how answers are read. No torch."""
