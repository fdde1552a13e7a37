"""Features of a target that does not exist: random states, and tokens that follow from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from transformers import LlamaConfig

from stages.artifacts import ArtifactWriter, TargetFingerprint
from stages.features.layout import WEIGHTS_FILE, FeatureRow, FeatureShard, shard_name, supervised_positions
from stages.heads import Eagle3Config, Eagle3Head

HIDDEN, VOCAB = 32, 96
TARGET_CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    tie_word_embeddings=True,
).to_dict()


def make_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=random),
        "norm.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=random),
    }


def make_row(mask: Sequence[int], seed: int, row_id: int = 0, tokens: int = VOCAB) -> FeatureRow:
    """A row with this loss mask; its labels are what the target's lm_head makes of `last`, among the first
    `tokens`.
    """
    random = torch.Generator().manual_seed(seed)
    loss_mask = torch.tensor(mask, dtype=torch.uint8)
    positions = supervised_positions(loss_mask, torch.tensor([0, len(mask)]))
    lm_head = make_weights()["embed_tokens.weight"][:tokens]
    last = torch.randn(len(positions), HIDDEN, generator=random)
    labels = (last @ lm_head.T).argmax(-1).int()
    input_ids = torch.randint(0, tokens, (len(mask),), generator=random, dtype=torch.int32)
    input_ids[positions + 1] = labels
    aux = torch.randn(len(mask), 3 * HIDDEN, generator=random)
    return FeatureRow(row_id, input_ids, loss_mask, aux, last, labels)


def make_features(uri: Path | str, shards: Sequence[Sequence[FeatureRow]], weights: str = "0") -> str:
    """A finished features artifact of these rows; `weights` stands for the digest of the target's."""
    fingerprint = TargetFingerprint(
        name="none", config="0", tokenizer="0", chat_template="0", weights=weights, dtype="float32"
    )
    settings: dict[str, object] = {"feature_layers": [2, 4, 5]}
    if all(_contexts(rows) for rows in shards):
        settings["last"] = "all"
    with ArtifactWriter.open(str(uri), "features", settings, target=fingerprint) as writer:
        for number, rows in enumerate(shards):
            shard = FeatureShard(
                input_ids=torch.cat([row.input_ids for row in rows]),
                loss_mask=torch.cat([row.loss_mask for row in rows]),
                row_offsets=torch.tensor([0, *(len(row.input_ids) for row in rows)]).cumsum(0),
                row_ids=torch.tensor([row.row_id for row in rows]),
                aux=torch.cat([row.aux for row in rows]),
                last=torch.cat([row.last for row in rows]),
                target_argmax=torch.cat([row.target_argmax for row in rows]),
                context=torch.cat(context) if (context := _contexts(rows)) else None,
            )
            writer.add_shard(shard_name(number), shard.to_bytes(), rows=len(rows))
        writer.add_file("target/config.json", json.dumps(TARGET_CONFIG).encode())
        writer.add_file(WEIGHTS_FILE, safetensors.torch.save(make_weights()))
        writer.finish({})
    return str(uri)


def _contexts(rows: Sequence[FeatureRow]) -> list[torch.Tensor]:
    """The last states of tokens that are not supervised, where rows have them."""
    return [row.stored_context for row in rows if row.stored_context is not None]


def make_head(draft_vocab_size: int = 64, seed: int = 0) -> Eagle3Head:
    torch.manual_seed(seed)
    head = Eagle3Head(Eagle3Config.from_target(TARGET_CONFIG, draft_vocab_size))
    head.embed_tokens.weight.data.copy_(make_weights()["embed_tokens.weight"])
    for parameter in head.parameters():
        if parameter.dim() == 1:  # norms: not all ones, so that forgetting one shows
            parameter.data += 0.2 * torch.randn_like(parameter)
    return head
