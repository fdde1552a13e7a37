"""What each of several processes runs in test_sharding: a head shared out, beside the same head whole.

Prints a line of JSON for each kind of head, of the first process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle_cli.__main__ import leave
from stages.errors import EagleError
from stages.features.layout import FeatureRow
from stages.heads import DraftHead, HeadKind, init_from_target, make_head
from stages.train.config import OptimizerKind
from stages.train.ranks import Ranks, joined
from stages.train.sharding import part
from stages.train.state import Best, TrainingState
from stages.train.training import Recipe, TargetOutput, Training
from stages.train.unroll import eagle1
from tests.train.chains import row_with_every_state
from tests.train.synthetic import TARGET_CONFIG, make_weights

STEPS = 4
SIZE = 50
"""Draft tokens: rows that two processes share evenly, and three do not."""

RECIPE = Recipe(total_steps=STEPS, lr=3e-3, warmup=0.0, ttt_steps=3, ttt_decay=0.8)

WAYS: tuple[tuple[torch.dtype, OptimizerKind], ...] = (
    (torch.float32, "adamw"),
    (torch.bfloat16, "adamw"),
    (torch.float32, "muon"),
)


def training(kind: HeadKind, ranks: Ranks, dtype: torch.dtype, optimizer: OptimizerKind) -> Training:
    torch.manual_seed(0)
    head = make_head(kind, TARGET_CONFIG, SIZE)
    init_from_target(head, make_weights(), init="random")
    rows = make_weights()["embed_tokens.weight"]
    output = TargetOutput(rows[:SIZE].to(dtype), None, rows, None)
    recipe = replace(RECIPE, optimizer=optimizer)
    return Training(head, output, recipe, dtype, ranks, sharded=ranks.size > 1)


def micro_batches(step: int) -> list[list[FeatureRow]]:
    """Two rows; in odd steps one, so that some processes have none."""
    rows = [row_with_every_state([0] * 4 + [1] * (9 + n), seed=n) for n in range(step, step + 2 - step % 2)]
    return [[row] for row in rows]


def held_bytes(training: Training) -> int:
    """Of trained weights, gradients and optimizer state, in this process; storages, not views."""
    tensors = TrainingState(training.head, training.optimizer, Best(), training.ranks)._tensors()
    kept = [*tensors.values(), *(p.grad for p in training.head.parameters() if p.grad is not None)]
    storages = {s.data_ptr(): s.nbytes() for s in (part(tensor).untyped_storage() for tensor in kept)}
    return sum(storages.values())


def weights(head: DraftHead) -> dict[str, Tensor]:
    return {name: p.detach().float() for name, p in head.named_parameters() if p.requires_grad}


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((tensor - b[name]).abs().max()) for name, tensor in a.items())


def compare(kind: HeadKind, ranks: Ranks, dtype: torch.dtype, optimizer: OptimizerKind) -> dict[str, Any]:
    shared, alone = (training(kind, group, dtype, optimizer) for group in (ranks, Ranks()))
    losses: list[list[float]] = []
    for step in range(STEPS):
        rows = micro_batches(step)
        mine = [shared.batch(each) for each in rows[ranks.rank :: ranks.size]]
        found = shared.step(mine, step)
        expected = alone.step([alone.batch(each) for each in rows], step)
        assert torch.equal(found.counted, expected.counted)
        losses.append((found.loss_sum / expected.loss_sum).tolist())
    held = [
        shared.evaluate(micro_batches(0)[ranks.rank :: ranks.size], 3),
        alone.evaluate(micro_batches(0), 3),
    ]
    bytes_held = held_bytes(shared), held_bytes(alone)

    before = TrainingState(shared.head, shared.optimizer, Best(), ranks).saved(best=False)
    spoilt = shared.batch(micro_batches(0)[0])
    spoilt = replace(spoilt, last=spoilt.last * torch.nan)
    refused = ""
    try:
        shared.step([spoilt] if ranks.first else [], STEPS)
    except EagleError as error:
        refused = str(error)
    after = TrainingState(shared.head, shared.optimizer, Best(), ranks).saved(best=False)

    head = shared.whole_head()
    if not ranks.first:
        return {}
    own = {name: after[f"weights.{name}"] for name in weights(alone.head)}
    saved = {name: tensor.to(torch.bfloat16).float() for name, tensor in own.items()}
    return {
        "kind": kind,
        "way": f"{optimizer} {dtype}".removesuffix(" torch.float32"),
        "loss": losses,
        "overlap": (held[0].overlap / held[1].overlap).tolist(),
        "asked": [each.asked.tolist() for each in held],
        "furthest": furthest(own, weights(alone.head)),
        "whole_head": furthest(saved, weights(head)),
        "bytes": bytes_held,
        "refused": refused,
        "unchanged": all(before[name].equal(after[name]) for name in before),
        "buffers": all(a.equal(b) for a, b in zip(head.buffers(), alone.head.buffers(), strict=True)),
    }


def main() -> None:
    kinds: tuple[HeadKind, ...] = ("eagle3", "eagle1", "medusa")
    eagle1.NOISE = 0.0  # which each process draws for its own rows
    with joined("cpu") as ranks:
        for kind in kinds:
            for dtype, optimizer in WAYS:
                found = compare(kind, ranks, dtype, optimizer)
                if ranks.first:
                    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
    leave(0)
