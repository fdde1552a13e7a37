"""Drafting a chain the way serving does, one token after the other, and heads of every kind to draft with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stages.features.layout import FeatureRow
from stages.heads import (
    DecoderHead,
    DraftHead,
    HeadKind,
    HeadOptions,
    MedusaHead,
    init_from_target,
    make_head,
)
from tests.train.synthetic import HIDDEN, TARGET_CONFIG, make_row, make_weights

PLAIN, EAGLE31 = HeadOptions(), HeadOptions(fc_norm=True, norm_output=True)


@dataclass(frozen=True)
class Variant:
    kind: HeadKind
    options: HeadOptions = PLAIN

    def __str__(self) -> str:
        changed = [f"{k}={v}" for k, v in vars(self.options).items() if v != getattr(PLAIN, k)]
        return ",".join([self.kind, *changed])


VARIANTS = (
    Variant("eagle3"),
    Variant("eagle3", HeadOptions(head_dim=24)),
    Variant("eagle3", EAGLE31),
    Variant("eagle3", HeadOptions(norm_before_fc=True, norm_before_residual=True)),
    Variant("eagle3", HeadOptions(layers=2)),
    Variant("eagle3", HeadOptions(layers=3, sliding_window=6, fc_norm=True, norm_output=True)),
    Variant("eagle3", HeadOptions(sliding_window=5)),
    Variant("eagle3", HeadOptions(sliding_window=2)),  # shorter than the chain
    Variant("eagle1"),
    Variant("eagle1", HeadOptions(layers=2)),
    Variant("medusa", HeadOptions(heads=4)),
    Variant("medusa", HeadOptions(heads=4, layers=2)),
)


def random_head(variant: Variant, seed: int = 0, draft_vocab_size: int = 64) -> DraftHead:
    """A head of the synthetic target, in evaluation; no norm is the identity and no block, so that forgetting
    one shows."""
    torch.manual_seed(seed)
    head = make_head(variant.kind, TARGET_CONFIG, draft_vocab_size, options=variant.options)
    init_from_target(head, make_weights(), init="random")
    for parameter in head.parameters():
        if parameter.requires_grad and (parameter.dim() == 1 or isinstance(head, MedusaHead)):
            parameter.data += 0.2 * torch.randn_like(parameter)
    return head.eval()


def row_with_every_state(mask: list[int], seed: int) -> FeatureRow:
    row = make_row(mask, seed)
    random = torch.Generator().manual_seed(seed + 100)
    others = len(mask) - len(row.supervised)
    return replace(row, stored_context=torch.randn(others, HIDDEN, generator=random))


class Rows:
    """Keys and values of one sequence in each layer, and attention over them by its definition."""

    def __init__(self, head: DecoderHead) -> None:
        self._config = head.config
        self._stored: list[list[tuple[int, Tensor, Tensor]]] = [[] for _ in head.layers_in_order]
        self.position = 0

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Of one token, at `position`."""
        stored, window = self._stored[layer], self._config.sliding_window
        stored.append((self.position, keys, values))
        seen = [(k, v) for at, k, v in stored if window is None or self.position - at < window]
        groups = self._config.num_attention_heads // self._config.num_key_value_heads
        attended = []
        for h in range(self._config.num_attention_heads):
            scores = torch.stack([queries[h] @ k[h // groups] for k, _ in seen]) / self._config.head_dim**0.5
            weights = scores.softmax(0)
            attended.append(sum(w * v[h // groups] for w, (_, v) in zip(weights, seen, strict=True)))
        return torch.stack(attended)


def draft_chain(head: DraftHead, row: FeatureRow, j: int, steps: int) -> list[Tensor]:
    """Logits of each of `steps` drafts behind the prefix 0 .. j, when the row's own tokens are drafted."""
    ids = row.input_ids.long()
    state = row.aux if head.config.state == "aux" else row.every_last
    assert state is not None
    if isinstance(head, MedusaHead):
        return list(head.logits(head(state[j]))[:steps])
    rows = Rows(head)

    def forward(index: int, feature: Tensor) -> Tensor:
        rows.position = index
        return head(ids[index + 1], feature, torch.tensor(index), rows.attend)

    hidden = [forward(index, head.fuse(state[index])) for index in range(j + 1)][-1]
    logits = [head.logits(hidden)]
    for depth in range(1, min(steps, len(ids) - 1 - j)):
        hidden = forward(j + depth, head.feedback(hidden))
        logits.append(head.logits(hidden))
    return logits
