"""The requests that every contestant of a sweep answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.bench.prompt_sets import PromptSet, opening
from stages.bench.record import Measured, Request
from stages.targets import Target


@dataclass(frozen=True)
class Job:
    """One request, the history of its conversation included.

    messages: for an endpoint; prompt_ids: the same rendered, for an engine in this process.
    plain: its plain answer, by which the others are judged; None where there is no target to ask.
    """

    set: str
    prompt_id: str
    turn: int
    messages: tuple[dict[str, str], ...]
    prompt_ids: tuple[int, ...] = ()
    plain: Request | None = None
    plain_text: str | None = None


def jobs_of(sets: Sequence[PromptSet], measured: Sequence[Measured], target: Target) -> list[Job]:
    """All turns that were answered one at a time, each as a request of its own with its plain history."""
    prompts = [prompt for each in sets for prompt in each.prompts]
    jobs = []
    for prompt, record in zip(prompts, measured, strict=True):
        messages = opening(prompt)
        for request in record.requests:
            answer = target.decode(list(request.plain.token_ids))
            jobs.append(
                Job(
                    record.set,
                    record.prompt_id,
                    request.turn,
                    tuple(messages),
                    request.prompt_ids,
                    request,
                    answer,
                )
            )
            if request.turn + 1 < len(prompt.turns):
                messages = [
                    *messages,
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": prompt.turns[request.turn + 1]},
                ]
    return jobs


def first_turns(sets: Sequence[PromptSet]) -> list[Job]:
    """What can be asked of endpoints without a target at hand."""
    return [Job(each.name, p.id, 0, tuple(opening(p))) for each in sets for p in each.prompts]
