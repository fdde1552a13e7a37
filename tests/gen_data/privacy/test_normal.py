from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.gen_data.privacy.normal import normalise


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("ja\u200bne\u2060@\ufeffx.com", "jane@x.com"),
        ("\uff4a\uff41\uff4e\uff45\uff20\uff58\uff0e\uff43\uff4f\uff4d", "jane@x.com"),
        ("212\u2011555\u20130123 \u2212 1", "212-555-0123 - 1"),
        ("\u0662\u0661\u0662", "212"),
        ("jose\u0301@x.es", "jos\u00e9@x.es"),
        ("a\u00a0b\u3000c", "a b c"),
        ("soft\u00adhyphen \u202eright to left\u202c", "softhyphen right to left"),
        ("jane\\_doe\\@x.com \\n \\-", "jane_doe@x.com \\n \\-"),
        ("line\nline\ttab\x00", "line\nline\ttab"),
    ],
)
def test_what_hides_characters_is_undone(text, normal):
    assert normalise(text).text == normal


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_every_character_of_the_normal_form_stands_for_a_stretch_of_the_original_in_order(text):
    normal = normalise(text)
    spans = [normal.original(i, i + 1) for i in range(len(normal.text))]
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert spans == sorted(spans)
    for character, (start, end) in zip(normal.text, spans, strict=True):
        part = text[start:end]
        assert character in normalise(part).text or unicodedata.combining(character)


@given(st.text(alphabet=st.sampled_from("ab@.\u200b\uff20\u0301\\_ -\u2011")))
def test_a_normal_form_is_its_own_normal_form(text):
    once = normalise(text).text
    assert normalise(once).text == once


def test_a_stretch_found_in_the_normal_form_is_the_whole_stretch_in_the_text():
    text = "to \uff4a\u200b\uff4f@x.com\u200b, please"
    normal = normalise(text)
    start = normal.text.index("jo@x.com")
    begin, end = normal.original(start, start + len("jo@x.com"))
    assert text[:begin] + "<>" + text[end:] == "to <>\u200b, please"


@given(st.text())
def test_a_text_that_is_said_to_be_normal_stays_so_character_by_character(text):
    if normalise(text).starts is None:
        spelled = normalise(text + "\ufdfa")  # which never is
        assert spelled.text.startswith(text)
