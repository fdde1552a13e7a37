from __future__ import annotations

import pytest
import torch

from kernels import accept_tree, draft_topk, gumbel_noise


def keys(nodes: int) -> dict[str, torch.Tensor]:
    return {"seed": torch.arange(nodes), "sample": torch.arange(nodes), "positions": torch.arange(nodes) + 20}


@pytest.mark.parametrize("mapped", [False, True])
def test_scores_are_sums_of_log_softmax_along_the_path_ties_by_index(mapped):
    logits = torch.randint(-3, 3, (4, 30)).float()  # ties
    ids = torch.arange(30) * 7 + 3 if mapped else torch.arange(30)
    temperature, strength = torch.tensor([0.0, 0.5, 1.0, 1.0]), torch.tensor([0.5, 0.5, 1.0, 0.0])
    scores, more = torch.tensor([0.0, -1.0, -2.0, -3.0]), keys(4)
    best = draft_topk(
        logits,
        scores,
        6,
        target_ids=ids if mapped else None,
        temperature=temperature,
        strength=strength,
        **more,
    )
    for m in range(4):
        z = logits[m].double()
        if temperature[m] > 0:
            noise = gumbel_noise(more["seed"][m], more["sample"][m], more["positions"][m] + 1, ids)
            z = (logits[m] / temperature[m] + strength[m] * noise).double()
        q = z.log_softmax(-1).tolist()
        order = sorted(range(30), key=lambda v: (-z[v], v))[:6]
        assert best.draft_id[m].tolist() == order
        assert best.token[m].tolist() == ids[order].tolist()
        expected = torch.tensor([float(scores[m]) + q[v] for v in order])
        torch.testing.assert_close(best.score[m], expected, rtol=1e-5, atol=1e-5)


def test_greedy_without_any_option_ranks_by_probability():
    logits = torch.randn(2, 50).bfloat16()
    best = draft_topk(logits, torch.zeros(2), 3)
    assert torch.equal(best.token, logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :3])


def test_a_drafter_that_knows_the_target_s_logits_and_noise_knows_its_draw():
    logits, more = torch.randn(8, 1, 200), keys(8)
    target = accept_tree(
        logits,
        *(torch.full((8, 1), x) for x in (0, -1)),
        more["positions"][:, None],
        torch.ones(8),
        more["seed"],
        more["sample"],
    )
    ones = torch.ones(8)
    best = draft_topk(logits[:, 0], torch.zeros(8), 1, temperature=ones, strength=ones, **more)
    assert torch.equal(best.token[:, 0], target.token)
