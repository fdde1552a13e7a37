"""The answer being written: token ids in, certain text out, until it ends for a reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

from stages.serve.detokenizer import Detokenizer
from stages.serve.stop_strings import StopStrings

FinishReason = Literal["stop", "length"]


class Answer:
    """One answer. Its text depends on the ids alone, not on how they were grouped on their way here.

    Args:
        end_ids: ids that end the answer and are no part of its text.
        max_tokens: ids after which it ends in any case.
        stops: strings that end the answer and are no part of its text.
        eos_ids: those of the target, which are no reason worth naming; all that end an answer by default.

    Attributes:
        token_ids: the ids so far, the one that ended the answer included and none after it.
        finish_reason: why it ended, None while it has not.
        stop_reason: the stop string that ended it, or the id that did though it is no end of sequence.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Collection[int],
        max_tokens: int,
        stops: Sequence[str] = (),
        eos_ids: Collection[int] | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._end_ids = end_ids
        self._eos_ids = end_ids if eos_ids is None else eos_ids
        self._max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def tokens(self) -> int:
        """Number of ids so far."""
        return len(self.token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that may be shown now. Ids after the end are dropped."""
        return "".join(self._push_one(token_id) for token_id in token_ids if self.finish_reason is None)

    def close(self) -> str:
        """Ends the answer because no more ids will come; returns the text still held, if any."""
        return self._finish("length") if self.finish_reason is None else ""

    def _push_one(self, token_id: int) -> str:
        self.token_ids.append(token_id)
        if token_id in self._end_ids:
            self.stop_reason = None if token_id in self._eos_ids else token_id
            return self._finish("stop")
        text = self._stops.push(self._detokenizer.push(token_id))
        if self._stops.found is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.found
        elif self.tokens >= self._max_tokens:
            text += self._finish("length")
        return text

    def _finish(self, reason: FinishReason) -> str:
        text = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        self.finish_reason = reason
        if self._stops.found is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.found
        return text
