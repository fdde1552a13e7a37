from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.artifacts import Artifact, ArtifactWriter, open_artifact
from stages.errors import EagleError
from stages.features.index import RowIndex, ShardIndex, label_counts
from stages.features.layout import supervised_positions
from stages.features.source import OfflineFeatures
from tests.train.synthetic import VOCAB, make_features, make_row

MASKS = ([0, 1, 1, 1, 0, 1, 1], [0, 0, 1], [0, 0, 0, 1, 1, 1, 1, 1])
"""Of three rows; the second has nothing supervised."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=["local", "remote"])
def features(request: pytest.FixtureRequest, tmp_path: Path) -> OfflineFeatures:
    rows = [make_row(mask, seed=n, row_id=10 + n) for n, mask in enumerate(MASKS)]
    place = tmp_path / "features" if request.param == "local" else f"memory://train-source/{tmp_path.name}"
    uri = make_features(place, [rows, rows[2:], rows[:1]])
    return OfflineFeatures(open_artifact(uri, "features"))


def test_the_index_says_what_the_rows_hold(features: OfflineFeatures):
    assert [shard.rows for shard in features.shards] == [
        (RowIndex(0, 0, 10, tokens=7, supervised=3), RowIndex(0, 2, 12, tokens=8, supervised=4)),
        (RowIndex(1, 0, 12, tokens=8, supervised=4),),
        (RowIndex(2, 0, 10, tokens=7, supervised=3),),
    ]
    for number, shard in enumerate(features.shards):
        with features.open(number) as rows:
            lengths = [len(MASKS[n]) for n in ([0, 1, 2], [2], [0])[number]]
            assert [len(row.input_ids) for row in rows] == lengths
            for index in shard.rows:
                assert rows[index.row].row_id == index.row_id
                assert len(rows[index.row].last) == index.supervised
            labels = torch.cat([row.input_ids[row.supervised + 1] for row in rows])
            assert shard.labels.equal(labels)


def test_the_index_is_read_without_the_states(features: OfflineFeatures, monkeypatch: pytest.MonkeyPatch):
    read: list[int] = []
    read_range = Artifact.read_range

    def counting(artifact: Artifact, path: str, start: int, stop: int) -> bytes:
        read.append(stop - start)
        return read_range(artifact, path, start, stop)

    monkeypatch.setattr(Artifact, "read_range", counting)
    monkeypatch.setattr(Artifact, "pinned", None)
    monkeypatch.setattr("stages.features.index._HEADER_BYTES", 64)
    tokens = sum(row.tokens for shard in features.shards for row in shard.rows) + len(MASKS[1])
    rows = sum(len(shard.rows) for shard in features.shards) + 1
    headers = 3 * 800
    assert 0 < sum(read) <= headers + 5 * tokens + 16 * rows + 3 * 8


@settings(max_examples=50)
@given(
    masks=st.lists(
        st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    data=st.data(),
)
def test_labels_are_counted_at_the_supervised_positions_of_the_chosen_rows(masks: list, data: st.DataObject):
    shards, counted = [], []
    for number, rows in enumerate(masks):
        mask = torch.tensor([bit for row in rows for bit in row], dtype=torch.uint8)
        offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
        ids = torch.arange(len(mask), dtype=torch.int32) * 7 % VOCAB
        shards.append(ShardIndex.of(number, ids, mask, offsets, torch.arange(len(rows)), size=0))
        for row, begin in enumerate(offsets[:-1].tolist()):
            own = mask[begin : begin + len(rows[row])]
            at = begin + supervised_positions(own, torch.tensor([0, len(own)])) + 1
            counted.append(((number, row), ids[at].tolist()))
    index = [row for shard in shards for row in shard.rows]
    assert [(row.shard, row.row) for row in index] == [place for place, labels in counted if labels]
    chosen = data.draw(st.lists(st.sampled_from(index), unique=True)) if index else []
    chosen.sort(key=lambda row: (row.shard, row.row))
    places = {(row.shard, row.row) for row in chosen}
    labels = [label for place, labels in counted if place in places for label in labels]
    expected = torch.bincount(torch.tensor(labels, dtype=torch.int64), minlength=VOCAB)
    assert label_counts(tuple(shards), chosen, VOCAB).equal(expected)


def test_a_file_that_is_no_feature_shard_is_refused_in_one_line(tmp_path: Path):
    for number, data in enumerate((b"{}", b"\xff" * 100, (2).to_bytes(8, "little") + b"{}")):
        uri = str(tmp_path / str(number))
        with ArtifactWriter.open(uri, "features", {"feature_layers": [2, 4, 5]}) as writer:
            writer.add_shard("features-00000.safetensors", data, rows=1)
            writer.finish({})
        artifact = open_artifact(uri, "features")
        with pytest.raises(EagleError, match=r"not a feature shard.*run eagle extract-features again"):
            _ = OfflineFeatures(artifact).shards
