"""One conversation of a real, tiny target: every kind of head learns it by heart, and then drafts it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.features.layout import FeatureRow
from stages.features.states import TokenBatch, target_states
from stages.heads import DraftHead, HeadOptions, init_from_target, make_head
from stages.targets import FeatureTaps, Target, load_target
from stages.train.batch import collate
from stages.train.loss import TargetLogits, draft_loss
from stages.train.unroll import unroll
from stages.train.vocabulary import draft_labels
from tests.tiny import make_tiny_target
from tests.train.chains import EAGLE31, Variant, draft_chain

PROMPT, ANSWER, STEPS, UPDATES = 9, 24, 3, 90


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path: Path = make_tiny_target(tmp_path_factory.mktemp("overfit"), vocab=300)
    return load_target(str(path), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def conversation(target: Target) -> FeatureRow:
    """The target's own greedy answer to a random prompt, and its states."""
    ids = torch.randint(0, 290, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        while ids.shape[1] < PROMPT + ANSWER:
            logits = target.model(ids).logits[:, -1]
            logits[:, list(target.eos_ids)] = -torch.inf
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    mask = torch.tensor([0] * PROMPT + [1] * ANSWER, dtype=torch.uint8)
    batch = TokenBatch((0,), ids[0].int(), mask, torch.tensor([0, PROMPT + ANSWER]))
    with FeatureTaps(target.decoder, target.feature_layers) as taps:
        states = target_states(target, taps, batch, every_last=True)
    return FeatureRow(
        0, ids[0].int(), mask, states.aux, states.last, states.target_argmax, stored_context=states.context
    )


def target_output(target: Target, row: FeatureRow, ids: torch.Tensor) -> TargetLogits:
    weight = target.model.get_output_embeddings().weight.detach()[ids]
    return TargetLogits(row.last, weight, None, 1.0, None, draft_labels(row.target_argmax, ids))


def learn(head: DraftHead, target: Target, row: FeatureRow) -> None:
    batch, output = collate([row], STEPS), target_output(target, row, head.draft_ids)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)
    weights = torch.ones(STEPS) / batch.counted.sum(1)
    head.train()
    for _ in range(UPDATES):
        unrolled = unroll(head, batch, STEPS)
        loss, _ = draft_loss(
            "cross-entropy", unrolled.states, unrolled.weight, output, batch.counted, weights
        )
        if unrolled.feature_loss is not None:
            loss = loss + unrolled.feature_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    head.eval()


@pytest.mark.parametrize(
    "variant",
    [
        Variant("eagle3"),
        Variant("eagle3", EAGLE31),
        Variant("eagle1"),
        Variant("medusa", HeadOptions(heads=STEPS)),
    ],
    ids=str,
)
def test_one_conversation_is_learned_to_100_percent_agreement(
    variant: Variant, target: Target, conversation: FeatureRow
) -> None:
    torch.manual_seed(0)
    tokens = conversation.target_argmax.long().unique()
    head = make_head(variant.kind, target.config, len(tokens), options=variant.options)
    head.set_vocabulary(tokens)
    weights = {
        "embed_tokens.weight": target.model.get_input_embeddings().weight.detach(),
        "lm_head.weight": target.model.get_output_embeddings().weight.detach(),
        "norm.weight": target.decoder.norm.weight.detach(),
    }
    init_from_target(head, weights, init="random")
    learn(head, target, conversation)
    for p in conversation.supervised.tolist():
        with torch.no_grad():
            chain = draft_chain(head, conversation, p - 1, min(STEPS, PROMPT + ANSWER - 1 - p))
        drafted = [int(head.draft_ids[logits.argmax(-1)]) for logits in chain]
        assert drafted == conversation.input_ids[p + 1 : p + 1 + len(drafted)].tolist()
