from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.heads import Eagle3Head
from stages.train.acceptance import TREE, Acceptance, Walk, measure, tree_nodes
from stages.train.batch import TttBatch, collate
from stages.train.training import TargetOutput
from stages.train.unroll import unroll
from tests.train.synthetic import VOCAB, make_head, make_row, make_weights

EVERYTHING = make_weights()["embed_tokens.weight"]


def measured(head: Eagle3Head, batch: TttBatch, steps: int) -> Acceptance:
    output = TargetOutput(EVERYTHING[head.draft_ids], None, EVERYTHING, None)
    return measure(head, batch, steps, output.of(batch, head.draft_ids), output.log_norm(batch.last))


def test_a_chain_is_accepted_up_to_its_first_miss_and_the_next_starts_behind_the_correction():
    hits = torch.tensor([[1, 0, 1, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1]])
    counted = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 0]])
    walk = Walk.along((hits * counted).double(), turns=[5, 2])
    # First turn: both drafts of query 0, none of query 3, the only one of query 4. Second: both of query 5.
    assert walk.cycles == 4
    assert walk.accepted == (3, 2)
    assert walk.acceptance == (3 / 4, 2 / 4)
    assert walk.tokens_per_step == 1 + 5 / 4


def test_a_walk_by_chance_is_what_many_draws_come_to():
    turn, steps = 30, 3
    random_chances = torch.Generator().manual_seed(0)
    chances = torch.rand(steps, turn, generator=random_chances).double()
    for step in range(steps):
        chances[step, turn - step :] = 0
    expected = Walk.along(chances, [turn])
    draws, cycles, accepted = random.Random(0), 0, [0] * steps
    rounds = 3000
    for _ in range(rounds):
        query = 0
        while query < turn:
            cycles += 1
            for step in range(steps):
                if draws.random() >= chances[step, query]:
                    break
                accepted[step] += 1
            else:
                step = steps
            query += step + 1
    assert cycles / rounds == pytest.approx(expected.cycles, rel=0.01)
    assert [count / rounds for count in accepted] == pytest.approx(expected.accepted, rel=0.03)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(2, 12), min_size=1, max_size=4), st.sampled_from([5, 40, VOCAB]), st.integers(1, 4)
)
def test_what_is_measured_equals_the_definitions(lengths: list[int], size: int, steps: int):
    head = make_head(draft_vocab_size=size)
    batch = collate([make_row([0] * 3 + [1] * n, seed=n, row_id=i) for i, n in enumerate(lengths)], steps)
    found = measured(head, batch, steps)
    unrolled = unroll(head, batch, steps)
    chances = torch.zeros(4, steps, batch.supervised, dtype=torch.float64)
    overlap = torch.zeros(steps, dtype=torch.float64)
    for step, query in itertools.product(range(steps), range(batch.supervised)):
        if not batch.counted[step, query]:
            continue
        p = (batch.last[query + step] @ EVERYTHING.T).double().softmax(-1)  # of the whole vocabulary
        z = unrolled.states[step, query] @ unrolled.weight.T
        ids = head.draft_ids[z.argsort(descending=True)]
        width = (TREE + (1,) * steps)[step]
        draft_p = torch.zeros(VOCAB, dtype=torch.float64)
        draft_p[head.draft_ids] = z.double().softmax(-1)
        overlap[step] += torch.minimum(p, draft_p).sum()
        likely = p.argmax()
        chances[:, step, query] = torch.stack(
            [
                (ids[0] == likely).double(),
                p[ids[0]],
                (ids[:width] == likely).any().double(),
                p[ids[:width]].sum(),
            ]
        )
    assert found.asked.tolist() == batch.counted.sum(1).tolist()
    torch.testing.assert_close(found.agreed, chances[0].sum(1))
    torch.testing.assert_close(found.drawn, chances[1].sum(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.overlap, overlap, rtol=1e-5, atol=1e-6)
    for number, each in enumerate(chances):
        walk = Walk.along(each, batch.turns)
        assert found.walk(number).cycles == pytest.approx(walk.cycles, rel=1e-5)
        assert found.walk(number).accepted == pytest.approx(walk.accepted, rel=1e-5)


def test_batches_add_up_to_the_same_whatever_their_size():
    head = make_head(draft_vocab_size=VOCAB)
    rows = [make_row([0] * 3 + [1] * n, seed=n) for n in (4, 9, 17, 30)]
    whole = measured(head, collate(rows, 3), 3)
    parts = sum((measured(head, collate([row], 3), 3) for row in rows), Acceptance.none(3))
    for a, b in zip(vars(whole).values(), vars(parts).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert whole.asked.tolist() == [56, 52, 48]


def test_labels_outside_the_draft_vocabulary_are_misses():
    row = make_row([0] * 3 + [1] * 30, seed=0)
    head = make_head(draft_vocab_size=1)
    head.set_vocabulary(row.target_argmax[:1].long())
    found = measured(head, collate([row], 2), 2)
    same = row.target_argmax == row.target_argmax[0]
    assert found.agreed.tolist() == [int(same.sum()), int(same[1:].sum())]
    assert found.asked.tolist() == [29, 28]


def test_the_tree_has_three_children_then_two_then_one():
    assert [tree_nodes(steps) for steps in (1, 2, 3, 5)] == [3, 9, 15, 27]


def test_the_normaliser_goes_over_the_whole_vocabulary_whatever_the_target_does_to_its_logits(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("stages.train.training.NORMALISER_ROWS", 10)
    monkeypatch.setattr("stages.train.training.NORMALISER_TOKENS", 3)
    bias, last = torch.randn(VOCAB), torch.randn(8, EVERYTHING.shape[1])
    output = TargetOutput(EVERYTHING[:4], bias[:4], EVERYTHING, bias, scale=0.5, softcap=7.0)
    logits: Tensor = ((last @ EVERYTHING.T + bias) * 0.5 / 7).tanh() * 7
    torch.testing.assert_close(output.log_norm(last), logits.logsumexp(-1))
