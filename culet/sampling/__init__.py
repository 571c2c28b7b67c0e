"""Turn logits into tokens, with sampling, log-probabilities and the verification of drafts."""
