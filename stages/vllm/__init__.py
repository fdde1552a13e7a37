"""vLLM for targets that need its speed or its tensor parallelism: token ids in, ids or states out.

vLLM is an optional package; nothing here imports it before an engine starts.
"""
