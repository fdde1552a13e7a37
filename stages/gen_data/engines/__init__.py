"""What answers prompts: the target in this process, vLLM, or a fleet behind an OpenAI-compatible API."""
