from __future__ import annotations

import pytest
import torch

from stages.features.layout import FeatureRow
from stages.heads import Eagle3Head
from stages.train import attention
from stages.train.attention import group_rows
from stages.train.batch import collate
from stages.train.ttt import ttt_hidden
from tests.train.synthetic import make_head, make_row

STEPS = 4
MASKS = (
    [0] * 5 + [1] * 9,
    [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1],  # two turns
    [0] * 21 + [1] * 3,
    [1, 1, 1, 1],  # no prompt: position 0 has no feature before it
)


def draft_chain(head: Eagle3Head, row: FeatureRow, j: int, drafted: list[int]) -> list[torch.Tensor]:
    """What serving does: prefill the head on 0 .. j, then draft on, token by token, one key after the
    other.
    """
    ids = row.input_ids.long()
    groups = head.config.num_attention_heads // head.config.num_key_value_heads
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    states: list[torch.Tensor] = []

    def forward(token: torch.Tensor, feature: torch.Tensor, position: int) -> torch.Tensor:
        x = head.attention_input(head.embed(token), feature)
        at = torch.tensor(position)
        k, v = head.keys_values(x, at)
        keys.append(k)
        values.append(v)
        q = head.queries(x, at)
        attended = []
        for h in range(head.config.num_attention_heads):
            scores = torch.stack([q[h] @ key[h // groups] for key in keys]) / head.config.head_dim**0.5
            weights = scores.softmax(0)
            attended.append(sum(w * value[h // groups] for w, value in zip(weights, values, strict=True)))
        return head.output(feature, torch.stack(attended))

    for index in range(j + 1):
        last = forward(ids[index + 1], head.fuse(row.aux[index]), index)
    states.append(last)
    for depth, token in enumerate(drafted, start=1):
        states.append(forward(torch.tensor(token), states[-1], j + depth))
    return states


def test_draft_steps_and_their_gradients_equal_drafting_a_chain_token_by_token(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 200)  # several pieces a group
    head = make_head()
    rows = [make_row(mask, seed) for seed, mask in enumerate(MASKS)]
    batch = collate(rows, STEPS)
    hidden = torch.stack(ttt_hidden(head, batch, STEPS))  # [S, Q, h]
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)) * batch.counted[..., None]
    trained = [parameter for name, parameter in head.named_parameters() if "midlayer" in name or "fc" in name]
    gradients = torch.autograd.grad((hidden * weights).sum(), trained)

    query, expected = 0, torch.zeros(())
    for row in sorted(rows, key=lambda row: len(row.input_ids), reverse=True):
        for p in row.supervised.tolist():
            drafted = row.input_ids[p + 1 : p + STEPS].tolist()
            for step, state in enumerate(draft_chain(head, row, p - 1, drafted)):
                if batch.counted[step, query]:
                    torch.testing.assert_close(hidden[step, query], state, rtol=1e-5, atol=1e-5)
                    expected = expected + (state * weights[step, query]).sum()
            query += 1
    assert query == batch.supervised
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, trained), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-4)


def test_a_row_does_not_see_the_rows_it_is_batched_with():
    head = make_head()
    row, long, short = make_row(MASKS[0], 0), make_row(MASKS[1], 1), make_row([0, 0, 1, 1, 1], 2)
    alone = ttt_hidden(head, collate([row], STEPS), STEPS)
    batch = collate([short, row, long], STEPS)
    together = ttt_hidden(head, batch, STEPS)
    own = slice(len(long.last), len(long.last) + len(row.last))
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(b[own], a, rtol=1e-5, atol=1e-5)


def test_rows_share_a_group_only_if_little_of_it_is_padding():
    groups = group_rows(
        [100, 90, 30, 28], [torch.arange(50), torch.arange(45), torch.arange(9), torch.arange(9)]
    )
    assert [len(group.keys) for group in groups] == [2, 2]
    assert torch.cat([group.queries[group.real] for group in groups]).tolist() == list(range(113))
