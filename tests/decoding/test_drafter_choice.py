"""Drafters by their names."""

from __future__ import annotations

import pytest

from stages.decoding.drafters import DrafterChoice, NoDrafter, make_drafter
from stages.errors import EagleError
from stages.targets import Target
from tests.decoding.test_drafters import HEADS
from tests.tiny import make_tiny_target


@pytest.mark.parametrize(
    "text", ["none", "eagle3", "eagle1", "medusa", "ngram:min=2,max=5", "draft:models/small", "oracle:0.8"]
)
def test_a_drafters_text_reads_back_as_the_same_drafter(text: str) -> None:
    assert str(DrafterChoice.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("eagle4", "unknown drafter 'eagle4'"),
        ("eagle3:depth=2", "takes no settings"),
        ("ngram:size=2", "takes min and max"),
        ("ngram:min=5,max=2", "min is at least 1"),
        ("ngram:min=x", "takes min and max"),
        ("draft", "needs a model"),
        ("oracle", "takes a probability"),
        ("oracle:1.5", "takes a probability"),
    ],
)
def test_a_wrong_drafter_text_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(EagleError, match=complaint):
        DrafterChoice.parse(text)


def test_a_drafter_that_does_not_go_with_what_is_there_is_refused(tiny_target: Target, tmp_path) -> None:
    with pytest.raises(EagleError, match="eagle1 needs a head of that kind, and none was given"):
        make_drafter(DrafterChoice.parse("eagle1"), tiny_target)
    with pytest.raises(EagleError, match="the one given is eagle3"):
        make_drafter(DrafterChoice.parse("medusa"), tiny_target, HEADS["eagle3"](tiny_target))
    other = make_tiny_target(tmp_path / "other", vocab=300)
    with pytest.raises(EagleError, match="another tokenizer"):
        make_drafter(DrafterChoice("draft", model=str(other)), tiny_target)
    assert isinstance(make_drafter(DrafterChoice("none"), tiny_target), NoDrafter)
