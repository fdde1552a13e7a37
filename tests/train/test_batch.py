from __future__ import annotations

from stages.train.batch import collate
from tests.train.synthetic import make_row

# position  0  1  2  3  4  5  6  7  8  9 10
MASK = [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1]


def test_queries_tokens_and_labels_are_those_worked_out_by_hand():
    row = make_row(MASK, seed=0)
    x = row.input_ids.tolist()
    batch = collate([row], steps=3)
    # Supervised, as fed token and label are both sampled: p = 2, 3, 4 and 8, 9. Queries are at j = p - 1.
    assert batch.queries.tolist() == [1, 2, 3, 7, 8]
    assert batch.positions.tolist() == list(range(9)), "keys end at the last query"
    assert batch.tokens.tolist() == x[1:10], "the token of key j is x[j+1]"
    assert batch.counted.int().tolist() == [
        [1, 1, 1, 1, 1],
        [1, 1, 0, 1, 0],
        [1, 0, 0, 0, 0],
    ]
    assert batch.step_tokens.tolist() == [
        [x[2], x[3], x[4], x[8], x[9]],
        [x[3], x[4], 0, x[9], 0],
        [x[4], 0, 0, 0, 0],
    ]
    assert batch.last.equal(row.last)
    assert batch.turns == [3, 2]


def test_rows_are_laid_end_to_end_longest_first():
    short, long = make_row([0, 0, 1, 1, 1], seed=1), make_row(MASK, seed=0)
    batch = collate([short, long], steps=2)
    assert batch.queries.tolist() == [1, 2, 3, 7, 8, 9 + 1, 9 + 2]
    assert batch.positions.tolist() == [*range(9), *range(3)]
    assert batch.target_argmax.tolist() == [*long.target_argmax.tolist(), *short.target_argmax.tolist()]
    assert batch.aux[9:].equal(short.aux[:3])
    assert batch.turns == [3, 2, 2]


def test_rows_without_a_prompt_are_turns_of_their_own():
    assert collate([make_row([1] * 6, seed=0), make_row([1] * 4, seed=1)], steps=2).turns == [4, 2]
