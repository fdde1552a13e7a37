"""Plain decoding of many prompts at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stages.decoding.engine import Engine, FinishReason, GenerationRequest
from stages.targets import Target


@dataclass(frozen=True)
class GenerationResult:
    """The ids sampled for a request, the one that ended it included."""

    id: str
    token_ids: list[int]
    finish_reason: FinishReason


def generate_batch(
    target: Target, requests: Sequence[GenerationRequest], max_batch: int = 32
) -> Iterator[GenerationResult]:
    """Answer the requests, yielding each as it finishes; long prompts start first.

    Raises:
        EagleError: a prompt is empty or leaves no room in the target's context.
    """
    if not requests:
        return
    engine = Engine(target, slots=min(max_batch, len(requests)))
    for request in sorted(requests, key=lambda r: (-len(r.prompt_ids), r.id)):
        engine.submit(request)
    outputs: dict[str, list[int]] = {request.id: [] for request in requests}
    while engine.busy:
        for emission in engine.step():
            outputs[emission.id] += emission.tokens
            if emission.finish_reason is not None:
                yield GenerationResult(emission.id, outputs.pop(emission.id), emission.finish_reason)
