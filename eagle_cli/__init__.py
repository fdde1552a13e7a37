"""The command line: parses, calls one stage, prints. No tensors."""
