from __future__ import annotations

from pathlib import Path

import pytest

from stages.artifacts import open_artifact
from stages.errors import EagleError
from stages.features.joined import offline_features
from stages.features.source import OfflineFeatures
from stages.progress import Reporter
from stages.train.config import TrainConfig
from stages.train.stage import choose_rows, run
from tests.train.synthetic import make_features, make_row

QUIET = Reporter(quiet=True)


@pytest.fixture
def parts(tmp_path: Path) -> list[str]:
    """Two artifacts of which some rows have the same number, of two shards and of one."""
    first = [make_row([0] * 4 + [1] * (9 + n), seed=n, row_id=n, tokens=40) for n in range(8)]
    second = [make_row([0] * 3 + [1] * (5 + n), seed=50 + n, row_id=n, tokens=40) for n in range(5)]
    return [
        make_features(tmp_path / "first", [first[:3], first[3:]]),
        make_features(tmp_path / "second", [second]),
    ]


def test_rows_of_several_are_those_of_each_and_none_is_another(parts: list[str]):
    artifacts = [open_artifact(uri, "features") for uri in parts]
    joined = offline_features(artifacts)
    assert [parent.uri for parent in joined.parents] == parts
    rows = [row for shard in joined.shards for row in shard.rows]
    assert len({row.row_id for row in rows}) == len(rows) == 13
    shards = [
        (OfflineFeatures(artifacts[0]), 0),
        (OfflineFeatures(artifacts[0]), 1),
        (OfflineFeatures(artifacts[1]), 0),
    ]
    for number, (source, own) in enumerate(shards):
        with joined.open(number) as got, source.open(own) as expected:
            assert len(got) == len(expected) == len(joined.shards[number].rows)
            for index, row, same in zip(joined.shards[number].rows, got, expected, strict=True):
                assert (index.shard, index.row_id) == (number, row.row_id)
                assert row.input_ids.equal(same.input_ids)
                assert row.last.equal(same.last)
                if number < 2:
                    assert row.row_id == same.row_id
        assert joined.shards[number].labels.equal(source.shards[own].labels)


def test_more_data_leaves_held_out_what_was_held_out_and_trains_on_the_rest(parts: list[str], tmp_path: Path):
    """A conversation's turn to be held out depends on its own number alone, so heads can be compared."""
    config = TrainConfig(features=parts, output=str(tmp_path / "head"), holdout=0.25)
    joined = offline_features([open_artifact(uri, "features") for uri in parts])
    first = offline_features([open_artifact(parts[0], "features")])
    train, held = choose_rows(joined, config)
    assert len(held) == 3
    assert len(train) == 10
    before = {row.row_id for row in choose_rows(first, config)[1]}
    assert before & {row.row_id for row in held}


def test_a_head_of_several_is_trained_stopped_and_continued(parts: list[str], tmp_path: Path):
    fields = {"device": "cpu", "batch_tokens": 32, "epochs": 3, "draft_vocab_size": 64, "holdout": 0.1}
    config = TrainConfig.model_validate(fields | {"features": parts, "output": str(tmp_path / "head")})
    result = run(config, QUIET)
    assert result is not None
    manifest = open_artifact(str(tmp_path / "head"), "head").manifest
    assert [parent.uri for parent in manifest.parents] == parts
    assert manifest.counts["train_rows"] == 12
    again = run(config, QUIET)
    assert again is not None
    assert again.seconds == 0.0
    other = config.model_copy(update={"features": parts[::-1]})
    with pytest.raises(EagleError, match="overwrite"):
        run(other, QUIET)


def test_what_does_not_belong_together_is_refused(parts: list[str], tmp_path: Path):
    def joined(*uris: str) -> None:
        offline_features([open_artifact(uri, "features") for uri in uris])

    with pytest.raises(EagleError, match=r"hold the same rows: give each features artifact once$"):
        joined(parts[0], parts[1], parts[0])
    grown = [make_row([0] * 4 + [1] * (9 + n), seed=n, row_id=n, tokens=40) for n in range(10)]
    with pytest.raises(EagleError, match=r"share 8 answers, so what is held out of one would be trained on"):
        joined(parts[0], make_features(tmp_path / "grown", [grown]))
    row = make_row([0, 1, 1, 1], seed=1)
    with pytest.raises(EagleError, match=r"of different targets \(they differ in weights\): extract both"):
        joined(parts[0], make_features(tmp_path / "others", [[row]], weights="1"))
