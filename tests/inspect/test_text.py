"""Text of tokens, cut where the target's own begin and end."""

from __future__ import annotations

import unicodedata
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.inspect.text import printable, segments


class Bytes:
    """A tokenizer whose ids are bytes, so that a character may lie on both sides of a cut."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return bytes(ids).decode(errors="replace")


class Stripping(Bytes):
    """And one that drops a space at the start, as SentencePiece's do."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return super().decode(ids, skip_special_tokens).removeprefix(" ")


@settings(max_examples=200)
@given(text=st.text(max_size=30), data=st.data(), tokenizer=st.sampled_from([Bytes(), Stripping()]))
def test_pieces_join_to_the_whole_text(text: str, data: st.DataObject, tokenizer: Any) -> None:
    ids = list(text.encode())
    mask = data.draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    found = segments(tokenizer, ids, mask)
    assert "".join(piece.text for piece in found) == tokenizer.decode(ids, skip_special_tokens=False)
    kinds = [piece.supervised for piece in found]
    assert kinds == [bool(value) for i, value in enumerate(mask) if i == 0 or value != mask[i - 1]]


def test_pieces_are_cut_where_the_mask_changes() -> None:
    found = segments(Bytes(), list(b"ask: yes."), [0, 0, 0, 0, 0, 1, 1, 1, 1])
    assert [(piece.text, piece.supervised) for piece in found] == [("ask: ", False), ("yes.", True)]


@given(st.text())
def test_printable_text_has_no_control_characters_and_is_otherwise_the_same(text: str) -> None:
    shown = printable(text)
    assert not [c for c in shown if unicodedata.category(c) == "Cc" and c not in "\n\t"]
    if all(c.isprintable() or c in "\n\t" for c in text):
        assert shown == text
