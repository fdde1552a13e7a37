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

    Attributes:
        tokens: number of ids so far, the one that ended the answer included and none after it.
        finish_reason: why it ended, None while it has not.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Collection[int],
        max_tokens: int,
        stops: Sequence[str] = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self.tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that may be shown now. Ids after the end are dropped."""
        return "".join(self._push_one(token_id) for token_id in token_ids if self.finish_reason is None)

    def close(self) -> str:
        """Ends the answer because no more ids will come; returns the text still held, if any."""
        return self._finish("length") if self.finish_reason is None else ""

    def _push_one(self, token_id: int) -> str:
        self.tokens += 1
        if token_id in self._end_ids:
            return self._finish("stop")
        text = self._stops.push(self._detokenizer.push(token_id))
        if self._stops.found:
            self.finish_reason = "stop"
        elif self.tokens >= self._max_tokens:
            text += self._finish("length")
        return text

    def _finish(self, reason: FinishReason) -> str:
        text = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        self.finish_reason = "stop" if self._stops.found else reason
        return text
