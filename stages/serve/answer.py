"""The answer being written: token ids in, certain text out, until it ends for a reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

from stages.serve.detokenizer import Detokenizer
from stages.serve.stop_strings import StopStrings
from stages.serve.tool_calls import Call, CallDelta, ToolCallReader

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer:
    """One answer. Its text depends on the ids alone, not on how they were grouped on their way here.

    Args:
        end_ids: ids that end the answer and are no part of its text.
        max_tokens: ids after which it ends in any case.
        stops: strings that end the answer and are no part of its text.
        min_tokens: so many ids come before a stop string is looked for.
        with_stop: what ends the answer is part of its text after all, if it is text.
        with_special: special tokens have a text, if they do not end the answer.
        eos_ids: those of the target, which are no reason worth naming; all that end an answer by default.
        reader: takes the calls of tools out of the text.
        markers: special tokens that have a text for the reader.

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
        min_tokens: int = 0,
        with_stop: bool = False,
        with_special: bool = False,
        eos_ids: Collection[int] | None = None,
        reader: ToolCallReader | None = None,
        markers: Mapping[int, str] | None = None,
    ) -> None:
        self.with_special = with_special
        self._detokenizer = Detokenizer(tokenizer, special=with_special)
        self._stops = StopStrings(stops, shown=with_stop)
        self._with_stop = with_stop
        self._end_ids = end_ids
        self._eos_ids = end_ids if eos_ids is None else eos_ids
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._reader = reader
        self._markers = markers or {}
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def tokens(self) -> int:
        """Number of ids so far."""
        return len(self.token_ids)

    @property
    def calls(self) -> list[Call]:
        """The calls of tools so far."""
        return [] if self._reader is None else self._reader.calls

    def new_calls(self) -> list[CallDelta]:
        """What has come of calls since the last time."""
        return [] if self._reader is None else self._reader.drain()

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
            last = self._read(self._stops.push(self._detokenizer.push(token_id))) if self._with_stop else ""
            return last + self._finish("stop")
        if marker := self._markers.get(token_id):
            raw = self._detokenizer.flush() + marker
        else:
            raw = self._detokenizer.push(token_id)
        text = self._read(self._stops.push(raw) if self.tokens > self._min_tokens else raw)
        if self._stops.found is not None or (self._reader is not None and self._reader.done):
            text += self._finish("stop")
        elif self.tokens >= self._max_tokens:
            text += self._finish("length")
        return text

    def _finish(self, reason: FinishReason) -> str:
        text = self._read(self._stops.push(self._detokenizer.flush()) + self._stops.flush())
        if self._stops.found is not None:
            reason, self.stop_reason = "stop", self._stops.found
        if self._reader is not None:
            text += self._reader.close()
            if self._reader.calls and reason == "stop":
                reason = "tool_calls"
        self.finish_reason = reason
        return text

    def _read(self, text: str) -> str:
        """The content in a piece of text."""
        return text if self._reader is None else self._reader.push(text)
