"""Media in the runner: features that towers compute, and where a step reads them."""
