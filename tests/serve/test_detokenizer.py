from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from stages.serve.detokenizer import HELD_LIMIT, Detokenizer
from stages.targets import Target

TEXTS = ["plain words", "naïve café, ÄÖÜ", "日本語の文章", "👩🏽‍🚀🎉 two\n\nlines \t end ", "a\ufffdb"]


def pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int], *, special: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, special=special)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def decoded(tokenizer: PreTrainedTokenizerFast, ids: list[int], *, special: bool = False) -> str:
    return tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


@cache
def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Llama-2's kind: spaces as \u2581, none at the start of a text, bytes for what the vocabulary lacks."""
    words = [
        "<unk>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "\u2581",
        *"abcdefghijklmnopqrstuvwxyz,",
        "\u2581a",
        "wo",
        "rd",
    ]
    backend = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[("\u2581", "a"), ("w", "o"), ("r", "d")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_has_a_part_of_a_character(target: Target, text: str) -> None:
    ids = target.tokenizer.encode(text)
    got = pieces(target.tokenizer, ids)
    assert "".join(got) == text
    assert sum(piece.count("\ufffd") for piece in got) == text.count("\ufffd")
    assert len([piece for piece in got if piece]) > 1


@pytest.mark.parametrize("text", TEXTS)
def test_a_tokenizer_that_drops_the_first_space_keeps_the_others(text: str) -> None:
    tokenizer = sentencepiece_like()
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == decoded(tokenizer, ids) == text


@given(ids=st.lists(st.integers(0, 511) | st.integers(505, 511), max_size=120), special=st.booleans())
def test_pieces_of_any_ids_join_to_the_text_of_all(target: Target, ids: list[int], special: bool) -> None:
    found = "".join(pieces(target.tokenizer, ids, special=special))
    assert found == decoded(target.tokenizer, ids, special=special)


@given(data=st.data())
def test_broken_bytes_join_to_the_text_of_all_too(target: Target, data: st.DataObject) -> None:
    broken = parts_of_characters(target)
    ids = data.draw(st.lists(st.sampled_from(broken), min_size=1, max_size=3 * HELD_LIMIT))
    assert "".join(pieces(target.tokenizer, ids)) == decoded(target.tokenizer, ids)


def test_broken_bytes_are_not_held_for_ever(target: Target) -> None:
    ids = parts_of_characters(target)[:1] * (2 * HELD_LIMIT)
    *during, at_the_end = pieces(target.tokenizer, ids)
    assert len("".join(during)) >= HELD_LIMIT
    assert len(at_the_end) <= HELD_LIMIT


def parts_of_characters(target: Target) -> list[int]:
    """Ids of the bytes above 127."""
    return [token_id for token_id in range(256) if target.decode([token_id]) == "\ufffd"]
