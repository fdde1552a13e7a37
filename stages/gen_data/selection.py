"""Which prompts are answered: the sources take turns, and what was asked before is left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass

from stages.prompts import Prompt, iter_prompts


@dataclass
class Tally:
    """What became of the prompts that were read; `read` is the sum of the others and of the prompts answered.

    Attributes:
        read: prompts read from the sources.
        duplicates: left out because the same turns came before.
        unscannable: left out because they could not be searched for personal data.
        too_long: left out because the target's context has no room for prompt and answer.
    """

    read: int = 0
    duplicates: int = 0
    unscannable: int = 0
    too_long: int = 0


def take_turns(sources: Sequence[str], tally: Tally) -> Iterator[Prompt]:
    """One prompt of each source, then the next of each, until all are used up; counts them as read.

    Raises:
        EagleError: a source cannot be read or is empty.
    """
    running = [iter_prompts(source) for source in dict.fromkeys(sources)]
    while running:
        for source in list(running):
            prompt = next(source, None)
            if prompt is None:
                running.remove(source)
            else:
                tally.read += 1
                yield prompt


def distinct(prompts: Iterable[Prompt], tally: Tally) -> Iterator[Prompt]:
    """The prompts whose system message and turns did not come before; the others are counted."""
    seen: set[bytes] = set()
    for prompt in prompts:
        key = _digest([prompt.system, *prompt.turns])
        if key in seen:
            tally.duplicates += 1
        else:
            seen.add(key)
            yield prompt


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """SHA-256, as hex digits, of all that the prompts say, in their order."""
    return hashlib.sha256(b"".join(_digest(astuple(prompt)) for prompt in prompts)).hexdigest()


def _digest(texts: Sequence[object]) -> bytes:
    return hashlib.sha256(json.dumps(texts).encode()).digest()
