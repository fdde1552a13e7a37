"""Conversations with hand-made masks, and features of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from stages.artifacts import ArtifactWriter, Manifest, open_artifact
from stages.artifacts.conversations import Conversation, shard_name, write_conversations
from stages.errors import EagleError
from stages.extract_features import stage
from stages.extract_features.config import ExtractFeaturesConfig
from stages.extract_features.estimate import FeaturesEstimate
from stages.features.layout import FeatureRow, read_feature_shards
from stages.progress import Reporter
from stages.targets import load_target

QUIET = Reporter(quiet=True)


VOCAB, CONTEXT = 300, 64


def conversation(number: int, mask: str) -> Conversation:
    rng = random.Random(number)
    return Conversation(
        id=str(number),
        source="test",
        license="",
        category="",
        messages=[],
        input_ids=[rng.randrange(VOCAB) for _ in mask],
        loss_mask=[int(c) for c in mask],
        finish_reason="stop",
    )


def conversations(uri: Path | str, target: Path, masks: list[str], dtype: str = "float32") -> str:
    fingerprint = load_target(str(target), device="cpu", dtype=dtype).fingerprint
    rows = [conversation(number, mask) for number, mask in enumerate(masks)]
    with ArtifactWriter.open(str(uri), "conversations", {}, target=fingerprint) as writer:
        for shard, start in enumerate(range(0, len(rows), 7)):
            part = rows[start : start + 7]
            writer.add_shard(shard_name(shard), write_conversations(part), rows=len(part))
        writer.finish({"rows": len(rows)})
    return str(uri)


def extract(target: Path, source: str, output: Path | str, **settings: object) -> stage.ExtractFeaturesResult:
    result = run(target, source, output, **settings)
    assert isinstance(result, stage.ExtractFeaturesResult)
    return result


def run(
    target: Path, source: str, output: Path | str, **settings: object
) -> stage.ExtractFeaturesResult | FeaturesEstimate:
    fields = {"target": str(target), "conversations": source, "output": str(output), "dtype": "float32"}
    return stage.run(ExtractFeaturesConfig(**(fields | settings)), QUIET)  # type: ignore[arg-type]


def manifest_of(output: Path | str) -> Manifest:
    return open_artifact(str(output), "features").manifest


def rows_of(output: Path | str) -> dict[int, FeatureRow]:
    shards = list(read_feature_shards(open_artifact(str(output), "features")))
    return {row.row_id: row for shard in shards for row in shard.rows()}


MASKS = [
    "0001111100",  # answer and trailing glue
    "00110001110000",  # two turns
    "0010",  # an answer of one token: nothing to learn
    *("0" * (3 + n % 5) + "1" * (2 + n % 11) for n in range(20)),
]


def check_states(row: FeatureRow, model: torch.nn.Module, ids: list[int], layers: tuple[int, ...]) -> None:
    with torch.no_grad():
        shown = model(torch.tensor([ids]), output_hidden_states=True)
    aux = torch.cat([shown.hidden_states[layer][0] for layer in layers], dim=-1)
    torch.testing.assert_close(row.aux, aux[: len(row.aux)], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(row.last, shown.hidden_states[-1][0, row.supervised], rtol=1e-5, atol=1e-5)
    assert row.target_argmax.tolist() == shown.logits[0, row.supervised].argmax(-1).tolist()


def refusal(target: Path, source: str, output: Path | str, **settings: object) -> str:
    with pytest.raises(EagleError) as error:
        extract(target, source, output, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)
