"""Stage 1: prompts -> scrubbed prompts -> the target's own answers -> token ids and loss mask."""
