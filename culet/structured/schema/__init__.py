"""From a JSON schema to the parts of a grammar: patterns, ranges of numbers, and the alternatives that a schema allows."""
