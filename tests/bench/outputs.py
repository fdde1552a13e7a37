"""Measured records made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from stages.bench.record import Measured, Output, Request


def output(
    token_ids: Sequence[int],
    *,
    prefill_s: float = 1.0,
    decode_s: float = 1.0,
    draft_s: float = 0.0,
    steps: int = 0,
    drafted: int = 0,
    accepted_per_depth: Sequence[int] = (),
) -> Output:
    return Output(
        token_ids=tuple(token_ids),
        finish_reason="length",
        prefill_s=prefill_s,
        decode_s=decode_s,
        draft_s=draft_s,
        verify_s=decode_s - draft_s,
        steps=steps,
        step_tokens=len(token_ids) - 1,
        drafted=drafted,
        accepted=sum(accepted_per_depth),
        accepted_per_depth=tuple(accepted_per_depth),
    )


def request(plain: Output, eagle: Output, *, turn: int = 0, prompt_ids: Sequence[int] = (1, 2)) -> Request:
    return Request(turn=turn, prompt_ids=tuple(prompt_ids), plain=plain, eagle=eagle)


def measured(*requests: Request, name: str = "eval", prompt_id: str = "p", skipped: int = 0) -> Measured:
    return Measured(set=name, prompt_id=prompt_id, requests=requests, skipped=skipped)
