"""Token ids to text as they come, without ever splitting a character.

A token may hold a part of a character, and some tokenizers write a token differently at the start of a
text. So ids are decoded in a window: those last turned into text, as context, and those that have not been
yet. Text is released when the window does not end in U+FFFD, which stands for bytes that are not a whole
character (yet).

For a byte-level tokenizer the pieces joined are the text of all ids decoded at once, whatever the ids.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
# A character is at most four bytes and a token at least one: a longer unfinished end is broken text.
HELD_LIMIT = 32
CONTEXT = 8


class Detokenizer:
    """Turns one answer's ids into text, piece by piece.

    Cost: two decodes of a few ids for each token; memory is one id a token.

    Args:
        special: special tokens have their names for a text, instead of none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset[int]() if special else frozenset(tokenizer.all_special_ids)
        self._ids: list[int] = []
        self._window = 0  # first id that is decoded
        self._held = 0  # first id whose text is not released
        self._released = 0  # characters of the window's text that are released

    def push(self, token_id: int) -> str:
        """Takes the next id; returns the text that has become certain, often all of this token's."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            piece = text[self._released :]
            self._window, self._held = self._held, len(self._ids)
            self._released = len(self._decode(self._window))
            return piece
        if len(self._ids) - self._held <= HELD_LIMIT:
            return ""
        piece = text[self._released : -1]
        self._window, self._held = len(self._ids) - CONTEXT, len(self._ids)
        self._released = max(0, len(self._decode(self._window)) - 1)
        return piece

    def flush(self) -> str:
        """Returns the text still held: the answer has ended, so an unfinished character stays U+FFFD."""
        piece = self._decode(self._window)[self._released :]
        self._window = self._held = len(self._ids)
        self._released = 0
        return piece

    def _decode(self, start: int) -> str:
        text = self._tokenizer.decode(
            self._ids[start:], skip_special_tokens=bool(self._skipped), clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
