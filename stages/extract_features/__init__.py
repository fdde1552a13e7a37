"""Stage 2, conversations -> features: the target's hidden states on its own answers, for a draft head."""
