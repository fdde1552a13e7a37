"""JSON schemas compiled in a process of their own first, with little time and memory.

llguidance's own limits do not hold everywhere: `{"multipleOf": 2147483648}`, or a few definitions that each
refer twice to the next, take it hours and all of the memory there is, and a thread cannot be ended.

This file is that process too, which therefore imports nothing of the package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

CPU_SECONDS = 3
MEMORY = 2 * 2**30  # of addresses
PATIENCE_SECONDS = 30.0  # for those CPU seconds, on a busy machine
HARMLESS_VALUES = 2000
# What makes a schema cost more than its size; all else is compiled as it is written.
MULTIPLYING = frozenset(("$ref", "$dynamicRef", "$recursiveRef", "allOf", "multipleOf"))


def needs_trial(schemas: Sequence[Any]) -> bool:
    """Whether compiling them may take more than a moment."""
    values, left = 0, list(schemas)
    while left:
        node = left.pop()
        values += 1
        if isinstance(node, dict):
            if values > HARMLESS_VALUES or not MULTIPLYING.isdisjoint(node):
                return True
            left += node.values()
        elif isinstance(node, list):
            left += node
    return values > HARMLESS_VALUES


def within_limits(schemas: str) -> bool:
    """Whether a JSON list of schemas compiles, or fails to, in the time and memory that are given to it.

    Raises:
        OSError, subprocess.TimeoutExpired: the machine is too busy to tell.
    """
    # -P: the other files of this folder are no modules to be found by their bare names.
    command = [sys.executable, "-P", __file__, str(CPU_SECONDS)]
    ended = subprocess.run(command, input=schemas.encode(), capture_output=True, timeout=PATIENCE_SECONDS)
    return ended.returncode == 0


def _main(cpu_seconds: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    for schema in json.load(sys.stdin):
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        except ValueError:
            continue  # which is told where it is compiled in earnest
        LLMatcher(tokenizer, grammar, log_level=0)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
