"""A request under way in the engine, and what it puts out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from stages.decoding.logprobs import TokenLogprobs
from stages.decoding.prefix import Held
from stages.decoding.sampling import SamplingParams, TokenHistory
from stages.decoding.stats import DecodeStats

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to answer; ``id`` is the caller's."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams


class Emission(NamedTuple):
    """Tokens that a step has added to one sequence's output; ``finish_reason`` is set with the last ones.

    accepted: so many of the tokens, the first ones, were drafted.
    logprobs: of each token, where the request wants them.
    """

    id: str
    tokens: list[int]
    finish_reason: FinishReason | None
    stats: DecodeStats
    logprobs: list[TokenLogprobs] | None = None
    accepted: int = 0


@dataclass(eq=False)
class Running:
    """A request under way.

    read: prompt tokens that are in the cache.
    pairs: verified pairs that the drafter has of it, see ``Drafter``.
    output: tokens so far; the last is the root of the next tree and not in the cache yet.
    on_device: whether the device loop has it, else the host's cycles.
    sound: whether the slot holds what is said here; not after a step that failed.
    """

    request: GenerationRequest
    cap: int
    end_ids: frozenset[int]
    drafts: bool
    slot: int = -1
    read: int = 0
    pairs: int = 0
    output: list[int] = field(default_factory=list)
    history: TokenHistory | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)
    on_device: bool = False
    sound: bool = True

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def stored(self) -> int:
        """Rows of the stable prefix: everything but the root."""
        return len(self.request.prompt_ids) + len(self.output) - 1 if self.output else self.read

    @property
    def held(self) -> Held:
        """What its slot holds."""
        return Held([*self.request.prompt_ids, *self.output], self.stored, self.pairs)

    @property
    def left(self) -> int:
        """Tokens that may be drafted: the target adds one of its own."""
        return self.cap - len(self.output) - 1

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.output and self.output[-1] in self.end_ids:
            return "stop"
        return "length" if len(self.output) >= self.cap else None
