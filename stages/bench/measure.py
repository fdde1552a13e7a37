"""Answering the same prompts plainly and with EAGLE, on one engine, one right after the other."""

from __future__ import annotations

from collections.abc import Sequence

from stages.bench.prompt_sets import opening
from stages.bench.record import Output, Request
from stages.decoding import EagleModel, Generation, SamplingParams
from stages.prompts import Prompt

WARM_UP_TOKENS = 32


def warm_up(model: EagleModel, prompt_ids: Sequence[int], params: SamplingParams) -> None:
    """Runs both ways once and forgets it: first calls pay for allocation and kernel selection."""
    short = SamplingParams(
        max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens),
        temperature=params.temperature,
        seed=params.seed,
        ignore_eos=True,
    )
    for speculative in (True, False):
        model.generate(list(prompt_ids), short, speculative=speculative)


def answer_both_ways(
    model: EagleModel, prompt_ids: Sequence[int], params: SamplingParams, *, eagle_first: bool
) -> tuple[Generation, Generation]:
    """The plain answer and EAGLE's, made in the order asked for."""
    answers = {
        speculative: model.generate(list(prompt_ids), params, speculative=speculative)
        for speculative in (eagle_first, not eagle_first)
    }
    return answers[False], answers[True]


def measure_prompt(
    model: EagleModel, prompt: Prompt, params: SamplingParams, number: int
) -> tuple[tuple[Request, ...], int]:
    """All turns of a prompt, and how many of them had to be skipped: those that no longer fit the context.

    The history of a later turn is the plain answer, so both ways always continue the same conversation. Which
    one goes first alternates with the turn and with `number`.
    """
    requests: list[Request] = []
    messages = opening(prompt)
    for turn, following in enumerate([*prompt.turns[1:], None]):
        prompt_ids = model.target.render(messages)
        if len(prompt_ids) >= model.target.max_length:
            break
        plain, eagle = answer_both_ways(model, prompt_ids, params, eagle_first=(number + turn) % 2 == 1)
        requests.append(
            Request(turn=turn, prompt_ids=tuple(prompt_ids), plain=Output.of(plain), eagle=Output.of(eagle))
        )
        if following is not None:
            messages += [
                {"role": "assistant", "content": plain.text},
                {"role": "user", "content": following},
            ]
    return tuple(requests), len(prompt.turns) - len(requests)


def answer_again(
    model: EagleModel, requests: Sequence[Request], params: SamplingParams
) -> tuple[Request, ...]:
    """The same requests once more, from the same prompt ids: in another dtype the history would drift."""
    again = []
    for request in requests:
        plain, eagle = answer_both_ways(model, request.prompt_ids, params, eagle_first=False)
        again.append(request.model_copy(update={"plain": Output.of(plain), "eagle": Output.of(eagle)}))
    return tuple(again)


def spread(total: int, count: int) -> list[int]:
    """`count` of `total` indices at even distances, ascending; all of them when there are no more."""
    count = min(count, total)
    return [(2 * i + 1) * total // (2 * count) for i in range(count)]
