"""The prompt sets of a run, each under a name of its own."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from stages.artifacts.manifest import canonical_json
from stages.errors import EagleError
from stages.prompts import Prompt, read_prompts
from stages.prompts.files import FILE_TYPES
from stages.prompts.source import BUILTIN
from stages.targets import Target


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are answered in one way and reported together; `name` is unique within a run.

    max_new_tokens: of each answer, at most; None is as long as the run allows.
    """

    name: str
    source: str
    prompts: tuple[Prompt, ...]
    temperature: float = 0.0
    max_new_tokens: int | None = None

    def identity(self) -> dict[str, Any]:
        """What decides the answers, as JSON values: a run continues only with the very same prompts."""
        content = [[prompt.id, prompt.system, *prompt.turns] for prompt in self.prompts]
        digest = hashlib.sha256(canonical_json(content)).hexdigest()
        return {"name": self.name, "prompts": len(self.prompts), "sha256": digest}


def read_prompt_sets(sources: Sequence[str], limit: int | None) -> list[PromptSet]:
    """The first `limit` prompts of each source, all by default.

    Raises:
        EagleError: a source does not exist, or cannot be read.
    """
    names = set_names(sources)
    return [
        PromptSet(name, src, tuple(read_prompts(src, limit)))
        for name, src in zip(names, sources, strict=True)
    ]


def at_temperatures(sets: Sequence[PromptSet], temperatures: Sequence[float]) -> list[PromptSet]:
    """Every set at every temperature; with several of them the names say which."""
    if len(temperatures) == 1:
        return [replace(each, temperature=temperatures[0]) for each in sets]
    return [
        replace(each, name=f"{each.name} T={temperature:g}", temperature=temperature)
        for temperature in temperatures
        for each in sets
    ]


def by_prompt_length(
    sets: Sequence[PromptSet], bounds: Sequence[int], count: Callable[[str], int]
) -> list[PromptSet]:
    """Every set in parts: prompts of up to bounds[0] tokens before the first answer, up to bounds[1], and so
    on; longer ones last. Parts without a prompt are left out.

    Args:
        bounds: ascending; none leaves the sets as they are.
        count: tokens of a text.
    """
    if not bounds:
        return list(sets)
    names = [*(f"prompt<={bound}" for bound in bounds), f"prompt>{bounds[-1]}"]
    found = []
    for each in sets:
        parts: list[list[Prompt]] = [[] for _ in names]
        for prompt in each.prompts:
            length = sum(count(message["content"]) for message in opening(prompt))
            parts[bisect_left(bounds, length)].append(prompt)
        found += [
            replace(each, name=f"{each.name} {name}", prompts=tuple(part))
            for name, part in zip(names, parts, strict=True)
            if part
        ]
    return found


def by_answer_length(sets: Sequence[PromptSet], lengths: Sequence[int]) -> list[PromptSet]:
    """Every set with answers of up to each length; with several of them the names say which."""
    if len(lengths) == 1:
        return [replace(each, max_new_tokens=lengths[0]) for each in sets]
    return [
        replace(each, name=f"{each.name} answer<={length}", max_new_tokens=length)
        for length in lengths
        for each in sets
    ]


def set_names(sources: Sequence[str]) -> list[str]:
    """A name for each source: that of the builtin set, the file without its ending, or the data set's.

    Where two would be equal, the later gets a number: `eval`, `eval-2`.
    """
    names: list[str] = []
    for src in sources:
        last = PurePosixPath(src.removeprefix(BUILTIN)).name
        ending = next((ending for ending in FILE_TYPES if last.lower().endswith(ending)), "")
        stem = last[: len(last) - len(ending)] or src
        name, number = stem, 1
        while name in names:
            number += 1
            name = f"{stem}-{number}"
        names.append(name)
    return names


def opening(prompt: Prompt) -> list[dict[str, str]]:
    """The messages before the first answer."""
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, {"role": "user", "content": prompt.turns[0]}]


def require_answerable(sets: Sequence[PromptSet], target: Target) -> None:
    """Refuses a set of which the target can answer nothing, before any time is spent.

    Raises:
        EagleError: no prompt of a set leaves room for an answer in the target's context.
    """
    for prompt_set in sets:
        if not any(len(target.render(opening(prompt))) < target.max_length for prompt in prompt_set.prompts):
            raise EagleError(
                f"none of the {len(prompt_set.prompts)} prompts of {prompt_set.source} fits the target's "
                f"context of {target.max_length} tokens: give shorter prompts"
            )
