"""The requests that every contestant of a sweep answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stages.bench.prompt_sets import PromptSet, opening
from stages.bench.record import Measured, Request
from stages.decoding import SamplingParams
from stages.targets import Target
from stages.targets.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Job:
    """One request, the history of its conversation included.

    messages: for an endpoint; prompt_ids: the same rendered, for an engine in this process.
    plain: its plain answer, by which the others are judged; None where there is no target to ask.
    temperature, max_new_tokens: of its answer; None is as long as the run allows.
    """

    set: str
    prompt_id: str
    turn: int
    messages: tuple[dict[str, str], ...]
    prompt_ids: tuple[int, ...] = ()
    plain: Request | None = None
    plain_text: str | None = None
    temperature: float = 0.0
    max_new_tokens: int | None = None

    def params(self, given: SamplingParams) -> SamplingParams:
        """Those of the run, cut to its own length."""
        if self.max_new_tokens is None or self.max_new_tokens >= given.max_new_tokens:
            return given
        return replace(given, max_new_tokens=self.max_new_tokens)


def jobs_of(sets: Sequence[PromptSet], measured: Sequence[Measured], target: Target) -> list[Job]:
    """All turns that were answered one at a time, each as a request of its own with its plain history."""
    prompts = [(prompt, each) for each in sets for prompt in each.prompts]
    jobs = []
    for (prompt, own), record in zip(prompts, measured, strict=True):
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
                    own.temperature,
                    own.max_new_tokens,
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
    return [
        Job(
            each.name,
            prompt.id,
            0,
            tuple(opening(prompt)),
            temperature=each.temperature,
            max_new_tokens=each.max_new_tokens,
        )
        for each in sets
        for prompt in each.prompts
    ]


_TEMPLATE_TOKENS = 64
"""What a chat template may add to a message, system message included."""


def longest_prompt(jobs: Sequence[Job], target: str) -> int:
    """Tokens of the longest prompt; where they are not rendered, no less than that.

    Raises:
        EagleError: the target's tokenizer cannot be loaded.
    """
    if all(job.prompt_ids for job in jobs):
        return max(len(job.prompt_ids) for job in jobs)
    tokenizer = load_tokenizer(target)
    return max(
        sum(len(tokenizer.encode(message["content"])) + _TEMPLATE_TOKENS for message in job.messages)
        for job in jobs
    )


def numbers_at(jobs: Sequence[Job], temperature: float) -> list[int]:
    """Places of the jobs that are answered at a temperature."""
    return [number for number, job in enumerate(jobs) if job.temperature == temperature]
