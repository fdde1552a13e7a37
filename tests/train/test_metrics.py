from __future__ import annotations

import torch

from stages.train.batch import collate
from stages.train.metrics import Agreement, measure_agreement
from tests.train.synthetic import make_head, make_row


def test_a_chain_is_accepted_up_to_its_first_miss_and_the_next_starts_behind_the_correction():
    hits = torch.tensor([[1, 0, 1, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1]]).bool()
    counted = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 0]]).bool()
    agreement = Agreement.of(hits, counted, turns=[5, 2])
    assert agreement.agreed == (5, 4)
    assert agreement.asked == (7, 5)
    # First turn: both drafts of query 0, none of query 3, the only one of query 4. Second: both of query 5.
    assert (agreement.cycles, agreement.accepted) == (4, 2 + 0 + 1 + 2)
    assert agreement.tokens_per_step == 1 + 5 / 4


def test_batches_add_up_to_the_same_agreement_whatever_their_size():
    head = make_head(draft_vocab_size=96)
    rows = [make_row([0] * 3 + [1] * n, seed=n) for n in (4, 9, 17, 30)]
    whole = measure_agreement(head, collate(rows, 3), 3)
    parts = [measure_agreement(head, collate([row], 3), 3) for row in rows]
    assert whole == sum(parts, Agreement.none(3))
    assert whole.asked == (56, 52, 48)


def test_labels_outside_the_draft_vocabulary_are_misses():
    row = make_row([0] * 3 + [1] * 30, seed=0)
    head = make_head(draft_vocab_size=1)
    head.set_vocabulary(row.target_argmax[:1].long())
    agreement = measure_agreement(head, collate([row], 2), 2)
    same = row.target_argmax == row.target_argmax[0]
    assert agreement.agreed == (int(same.sum()), int(same[1:].sum()))
    assert agreement.asked == (29, 28)
