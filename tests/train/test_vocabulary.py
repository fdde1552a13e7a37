from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import EagleError
from stages.train.vocabulary import choose_vocabulary, draft_labels
from tests.train.synthetic import VOCAB, make_head

counts = st.lists(st.integers(0, 50), min_size=VOCAB, max_size=VOCAB).map(torch.tensor)


@given(counts, st.integers(1, VOCAB))
def test_the_head_maps_to_and_from_the_most_frequent_labels(label_counts: torch.Tensor, size: int):
    ids = choose_vocabulary(label_counts, size).ids
    assert len(ids) == size
    assert bool((ids.diff() > 0).all())
    left_out = torch.ones(VOCAB, dtype=torch.bool)
    left_out[ids] = False
    if size < VOCAB:
        assert label_counts[ids].min() >= label_counts[left_out].max()
    head = make_head(draft_vocab_size=size)
    head.set_vocabulary(ids)
    assert head.t2d.nonzero().squeeze(1).equal(head.d2t + torch.arange(size))
    labels = draft_labels(torch.arange(VOCAB), head.draft_ids)
    assert labels[ids].equal(torch.arange(size))
    assert bool((labels[left_out] == -1).all())


def test_the_automatic_size_is_the_least_multiple_of_64_that_covers_99_percent():
    label_counts = torch.zeros(1000, dtype=torch.int64)
    label_counts[300:400] = 100
    label_counts[:100] = 1  # 100 of 10,100: leaving all of them out leaves more than 99 %
    vocabulary = choose_vocabulary(label_counts, 0)
    assert len(vocabulary.ids) == 128
    assert vocabulary.coverage == pytest.approx((10_000 + 28) / 10_100)
    label_counts[500:530] = 100
    assert len(choose_vocabulary(label_counts, 0).ids) == 192


def test_fewer_distinct_labels_than_asked_for_are_filled_up_with_the_lowest_ids():
    label_counts = torch.zeros(50, dtype=torch.int64)
    label_counts[[9, 30]] = torch.tensor([4, 2])
    vocabulary = choose_vocabulary(label_counts, 5)
    assert vocabulary.ids.tolist() == [0, 1, 2, 9, 30]
    assert vocabulary.coverage == 1
    assert len(choose_vocabulary(label_counts, 0).ids) == 50, "not more than the target has"


def test_more_than_the_target_has_is_refused():
    with pytest.raises(EagleError, match="--draft-vocab-size 51 is more than the 50 tokens"):
        choose_vocabulary(torch.ones(50, dtype=torch.int64), 51)
