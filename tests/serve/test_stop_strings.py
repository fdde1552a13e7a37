from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.serve.stop_strings import StopStrings

LETTERS = st.text(alphabet="ab\n", max_size=12)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def passed(stops: list[str], pieces: list[str], **options: bool) -> tuple[list[str], str | None]:
    filter_ = StopStrings(stops, **options)
    shown = [filter_.push(piece) for piece in pieces]
    return [*shown, filter_.flush()], filter_.found


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "found"),
    [
        (["END"], ["one E", "N", "D two"], ["one ", "", "", ""], "END"),
        (["END"], ["one E", "N", "E"], ["one ", "", "ENE"[:2], "E"], None),
        (["END"], ["one", " EN"], ["one", " ", "EN"], None),
        ([], ["one", " two"], ["one", " two", ""], None),
        (["\n\n", "\nUser:"], ["a\n", "User:b"], ["a", "", ""], "\nUser:"),
    ],
)
def test_what_may_begin_a_stop_string_is_held(
    stops: list[str], pieces: list[str], shown: list[str], found: str | None
) -> None:
    assert passed(stops, pieces) == (shown, found)


@given(stops=STOPS, pieces=st.lists(LETTERS, max_size=8))
def test_text_ends_before_the_stop_string_that_is_complete_first(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    shown, found = passed(stops, pieces)
    assert (found is not None) == bool(ends)
    if ends:
        longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        assert found == longest
        text = text[: ends[0] - len(longest)]
    assert "".join(shown) == text
    with_stop, _ = passed(stops, pieces, shown=True)
    assert "".join(with_stop) == text + (found or "")
