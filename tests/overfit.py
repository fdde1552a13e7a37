"""A head that knows a few answers of a tiny target by heart: within seconds, and without the train stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F

from stages.artifacts import ArtifactWriter
from stages.decoding import GenerationRequest, SamplingParams, generate_batch
from stages.features.layout import FeatureRow, FeatureShard, shard_name
from stages.features.states import TokenBatch, target_states
from stages.features.target_files import write_target_files
from stages.heads import DraftHead, HeadKind, HeadOptions, init_from_target, make_head
from stages.targets import FeatureTaps, Target
from stages.train.batch import collate
from stages.train.unroll import unroll

STEPS = 3


def answered_rows(target: Target, number: int, new_tokens: int, temperature: float = 0.0) -> list[FeatureRow]:
    """Rows with the target's own answers to some prompts, two of them in two turns, and all its states."""
    return list(_answered(target, number, new_tokens, temperature).rows())


def features_artifact(
    uri: Path | str, target: Target, layers: tuple[int, int, int] | None = None, temperature: float = 0.0
) -> str:
    """Features of such rows; said to be of the default layers, even where they are of others."""
    named = {"feature_layers": list(target.feature_layers)}
    with ArtifactWriter.open(str(uri), "features", named, target=target.fingerprint) as writer:
        shard = _answered(target, len(_WORDS), 20, temperature, layers=layers)
        writer.add_shard(shard_name(0), shard.to_bytes(), rows=len(shard.row_ids))
        write_target_files(writer, target)
        writer.finish({})
    return str(uri)


def _answered(
    target: Target,
    number: int,
    new_tokens: int,
    temperature: float = 0.0,
    layers: tuple[int, int, int] | None = None,
) -> FeatureShard:
    prompts = [target.render([{"role": "user", "content": f"tell me {word}"}]) for word in _WORDS[:number]]
    ids, masks = _answer(target, prompts, new_tokens, temperature)
    again = [ids[n] + target.tokenizer.encode("and more?") for n in range(2)]
    more, their_masks = _answer(target, again, new_tokens, temperature)
    for n in range(2):
        masks[n] = masks[n] + their_masks[n][len(masks[n]) :]
        ids[n] = more[n]
    batch = TokenBatch(
        row_ids=tuple(range(number)),
        input_ids=torch.tensor([*chain(*ids)], dtype=torch.int32),
        loss_mask=torch.tensor([*chain(*masks)], dtype=torch.uint8),
        row_offsets=torch.tensor([0, *map(len, ids)]).cumsum(0),
    )
    with FeatureTaps(target.decoder, layers or target.feature_layers) as taps:
        states = target_states(target, taps, batch, every_last=True)
    return FeatureShard(
        input_ids=batch.input_ids,
        loss_mask=batch.loss_mask,
        row_offsets=batch.row_offsets,
        row_ids=torch.tensor(batch.row_ids),
        aux=states.aux,
        last=states.last,
        target_argmax=states.target_argmax,
        context=states.context,
    )


_WORDS = ("rain", "snow", "wind", "stars", "trees", "stones", "rivers", "birds", "cats", "boats")


def _answer(
    target: Target, prompts: Sequence[list[int]], new_tokens: int, temperature: float
) -> tuple[list[list[int]], list[list[int]]]:
    params = SamplingParams(max_new_tokens=new_tokens, temperature=temperature, seed=5)
    requests = [GenerationRequest(str(n), prompt, params) for n, prompt in enumerate(prompts)]
    answers = {int(result.id): result.token_ids for result in generate_batch(target, requests)}
    ids = [prompt + answers[n] for n, prompt in enumerate(prompts)]
    return ids, [[0] * len(prompt) + [1] * len(answers[n]) for n, prompt in enumerate(prompts)]


def overfitted_head(
    target: Target, rows: Sequence[FeatureRow], kind: HeadKind = "eagle3", updates: int = 100
) -> DraftHead:
    """Learns the rows' own tokens by plain cross-entropy, in float32; its draft vocabulary has gaps."""
    torch.manual_seed(0)
    used = torch.cat([row.input_ids for row in rows]).unique()
    options = HeadOptions(heads=STEPS) if kind == "medusa" else None
    head = make_head(kind, target.config, len(used), options=options)
    head = head.train()
    head.set_vocabulary(used.long())
    weights = {
        "embed_tokens.weight": target.model.get_input_embeddings().weight,
        "lm_head.weight": target.model.get_output_embeddings().weight,
        "norm.weight": target.decoder.norm.weight,
    }
    init_from_target(head, weights, init="target")
    batch = collate(rows, STEPS)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=5e-3)
    labels = torch.searchsorted(used.long(), _labels(rows))  # [S, Q]
    for _ in range(updates):
        unrolled = unroll(head, batch, STEPS)
        logits = unrolled.states[batch.counted] @ unrolled.weight.T
        loss = F.cross_entropy(logits, labels[batch.counted])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


def _labels(rows: Sequence[FeatureRow]) -> torch.Tensor:
    """The row's own tokens behind each supervised position, in the order of `collate`; any where none is."""
    ordered = sorted(rows, key=lambda row: int(row.supervised[-1]), reverse=True)
    return torch.cat(
        [
            row.input_ids.long()[
                (row.supervised[None] + 1 + torch.arange(STEPS)[:, None]).clamp(max=len(row.input_ids) - 1)
            ]
            for row in ordered
        ],
        dim=1,
    )
