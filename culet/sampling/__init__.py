"""From logits to tokens: sampling, log-probabilities, verifying drafts."""
