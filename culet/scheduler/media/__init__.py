"""Media in the scheduler: which features are computed, kept and dropped."""
