"""With `--last all` a shard has the target's state after the final norm at every token of every row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.artifacts import ArtifactWriter, open_artifact
from stages.artifacts.conversations import Conversation, shard_name, write_conversations
from stages.features.config import FeatureSettings
from stages.features.extraction import plan_extraction
from stages.features.layout import FeatureRow, FeatureShard
from stages.targets import Target

MASKS = ("0001111111111111", "001100011", "011111", "0000111", "0011")


@pytest.fixture(scope="module")
def conversations(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = str(tmp_path_factory.mktemp("conversations") / "some")
    random = torch.Generator().manual_seed(0)
    rows = [
        Conversation(
            id=str(number),
            source="test",
            license="",
            category="",
            messages=[],
            input_ids=torch.randint(0, 500, (len(mask),), generator=random).tolist(),
            loss_mask=[int(c) for c in mask],
            finish_reason="stop",
        )
        for number, mask in enumerate(MASKS)
    ]
    with ArtifactWriter.open(uri, "conversations", {}, target=tiny_target.fingerprint) as writer:
        writer.add_shard(shard_name(0), write_conversations(rows), rows=len(rows))
        writer.finish({})
    return uri


def rows_of(target: Target, conversations: str, **settings: object) -> list[FeatureRow]:
    """Read back from the file of the only shard."""
    extraction = plan_extraction(
        FeatureSettings.model_validate(settings), target, open_artifact(conversations, "conversations")
    )
    (sizes,) = extraction.sizes
    with extraction.running() as extractor:
        data = extractor.shard(0).to_bytes()
    assert len(data) == sizes.bytes
    return list(FeatureShard.from_bytes(data).rows())


@pytest.mark.parametrize(("storage", "near"), [("auto", 1e-5), ("fp8", 0.1)])
def test_every_token_has_its_last_state(
    storage: str, near: float, tiny_target: Target, conversations: str
) -> None:
    rows = rows_of(tiny_target, conversations, last="all", storage_dtype=storage)
    assert len(rows) == len(MASKS)
    for row in rows:
        with torch.no_grad():
            expected = tiny_target.decoder(row.input_ids.long()[None]).last_hidden_state[0]
        assert row.every_last is not None
        torch.testing.assert_close(row.every_last.float(), expected, rtol=near, atol=near)
        assert torch.equal(row.every_last[row.supervised], row.last)


def test_by_default_only_supervised_tokens_have_one(tiny_target: Target, conversations: str) -> None:
    with_all = rows_of(tiny_target, conversations, last="all")
    for row, other in zip(rows_of(tiny_target, conversations), with_all, strict=True):
        assert row.every_last is None
        assert torch.equal(row.aux, other.aux)
        assert torch.equal(row.last, other.last)


def test_the_settings_of_features_name_it_only_where_it_is_asked_for(
    tiny_target: Target, conversations: str, tmp_path: Path
) -> None:
    def settings(**given: object) -> dict[str, object]:
        artifact = open_artifact(conversations, "conversations")
        return plan_extraction(FeatureSettings.model_validate(given), tiny_target, artifact).settings

    assert settings(last="all") == settings() | {"last": "all"}
    assert "last" not in settings()
