"""What is measured: one record a prompt, as a line of JSON in the report's shards."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from stages.decoding import Generation


class Record(BaseModel):
    """Base of the records: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Output(Record):
    """One answer and what it took; times in seconds, counts as in `stages.decoding.DecodeStats`.

    prefill_s: until the first token, which is the time to first token.
    decode_s: from there to the end; draft_s and verify_s are its parts.
    """

    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    prefill_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    steps: int
    step_tokens: int
    drafted: int
    accepted: int
    accepted_per_depth: tuple[int, ...]

    @classmethod
    def of(cls, generation: Generation) -> Output:
        stats = generation.stats
        return cls(
            token_ids=tuple(generation.token_ids),
            finish_reason=generation.finish_reason,
            prefill_s=stats.prefill_s,
            decode_s=stats.decode_s,
            draft_s=stats.draft_s,
            verify_s=stats.verify_s,
            steps=stats.steps,
            step_tokens=stats.tokens,
            drafted=stats.drafted,
            accepted=stats.accepted,
            accepted_per_depth=tuple(stats.accepted_per_depth),
        )

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


class Request(Record):
    """One turn of a conversation, answered plainly and with EAGLE from the same prompt ids."""

    turn: int
    prompt_ids: tuple[int, ...]
    plain: Output
    eagle: Output


class Measured(Record):
    """The requests of one prompt. `skipped` turns did not fit the context."""

    set: str
    prompt_id: str
    requests: tuple[Request, ...]
    skipped: int = 0


class Recheck(Record):
    """The requests of prompt number `prompt` (counted over all sets) answered once more in float32."""

    prompt: int
    requests: tuple[Request, ...]


class Sample(Record):
    """One request of a sweep; times in seconds from when it was sent.

    request: number in the workload.
    itl_s: between one arrival of tokens and the next; an arrival may bring several tokens.
    token_ids: of an engine in this process; text: of an endpoint.
    ours: whether it came from our engine, here or behind an endpoint, which draws with our noise.
    steps, drafted, accepted, accepted_per_depth: as in `Output`; 0 where an endpoint does not tell.
    """

    request: int
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    e2el_s: float
    itl_s: tuple[float, ...]
    finish_reason: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    ours: bool = False
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_depth: tuple[int, ...] = ()


class Turn(Record):
    """What one contestant did while it had the machine; times in seconds.

    rate: requests a second that came; null where the next one came when one was answered.
    prefill_s, draft_s, verify_s: parts of `duration_s`; null where nothing tells them.
    peak_memory, peak_gpu_memory: bytes so far, of whoever answers; null where they cannot be seen.
    """

    contestant: str
    concurrency: int
    rate: float | None = None
    temperature: float = 0.0
    duration_s: float
    prefill_s: float | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    peak_memory: int | None = None
    peak_gpu_memory: int | None = None
    samples: tuple[Sample, ...]
