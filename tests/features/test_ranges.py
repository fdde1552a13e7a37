"""Rows read by ranges are the rows of the file."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.artifacts import Artifact, ArtifactWriter, open_artifact
from stages.errors import EagleError
from stages.features.layout import FeatureShard, supervised_positions
from stages.features.ranges import ShardRanges
from stages.features.storage import FP8, StorageFormat

HIDDEN = 8
MASKS = st.lists(st.text(alphabet="01", min_size=1, max_size=9), min_size=1, max_size=5)
DTYPES = [torch.bfloat16, torch.float32, FP8]


def make(masks: list[str], dtype: torch.dtype) -> FeatureShard:
    loss_mask = torch.tensor([int(c) for c in "".join(masks)], dtype=torch.uint8)
    offsets = torch.tensor([0, *(len(mask) for mask in masks)]).cumsum(0)
    tokens, supervised = len(loss_mask), len(supervised_positions(loss_mask, offsets))
    storage = StorageFormat(dtype)
    aux, aux_scale = storage.pack(torch.randn(tokens, 3 * HIDDEN), 3)
    last, last_scale = storage.pack(torch.randn(supervised, HIDDEN), 1)
    return FeatureShard(
        input_ids=torch.arange(tokens, dtype=torch.int32),
        loss_mask=loss_mask,
        row_offsets=offsets,
        row_ids=torch.arange(len(masks)) + 7,
        aux=aux,
        last=last,
        target_argmax=torch.arange(supervised, dtype=torch.int32) + 100,
        aux_scale=aux_scale,
        last_scale=None if last_scale is None else last_scale.flatten(),
    )


def stored(uri: str, data: bytes, rows: int = 1) -> Artifact:
    with ArtifactWriter.open(uri, "features", {}, overwrite=True) as writer:
        writer.add_shard("features-0.safetensors", data, rows=rows)
        writer.finish({})
    return open_artifact(uri, "features")


@settings(max_examples=40, deadline=None)
@given(masks=MASKS, data=st.data(), dtype=st.sampled_from(DTYPES))
def test_rows_are_those_of_the_whole_shard(masks: list[str], data: st.DataObject, dtype: torch.dtype) -> None:
    whole = make(masks, dtype)
    artifact = stored("memory://ranges/any", whole.to_bytes(), len(masks))
    begin = data.draw(st.integers(0, len(masks) - 1))
    end = data.draw(st.integers(begin + 1, len(masks)))
    ranges = ShardRanges(artifact, artifact.manifest.shards[0])
    assert ranges.row_ids.tolist() == whole.row_ids.tolist()
    found = list(ranges.rows(begin, end).rows())
    for row, expected in zip(found, list(whole.rows())[begin:end], strict=True):
        assert row.row_id == expected.row_id
        for name in ("input_ids", "loss_mask", "aux", "last", "target_argmax"):
            torch.testing.assert_close(getattr(row, name), getattr(expected, name), rtol=0, atol=0)


def test_only_the_states_of_the_rows_are_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = make(["0111"] * 200, torch.float32)
    artifact = stored(str(tmp_path_factory.mktemp("ranges")), whole.to_bytes())
    read = 0
    original = artifact.read_range

    def counted(path: str, start: int, stop: int) -> bytes:
        nonlocal read
        read += stop - start
        return original(path, start, stop)

    artifact.read_range = counted  # type: ignore[method-assign]
    ShardRanges(artifact, artifact.manifest.shards[0]).rows(150, 152)
    assert read < whole.aux.nbytes / 5


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"{}", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_what_is_no_shard_is_refused_by_name(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    artifact = stored(str(tmp_path_factory.mktemp("ranges")), data)
    with pytest.raises(EagleError, match=r"features-0-\w+.safetensors is not a feature shard"):
        ShardRanges(artifact, artifact.manifest.shards[0])
