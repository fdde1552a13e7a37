"""Stage 4: target and draft head behind an OpenAI-compatible API."""
