"""Claims about the features format: which positions are supervised, and that shards hold what they say."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import EagleError
from stages.features.layout import FeatureShard, shard_bytes, supervised_positions


def positions(*masks: str) -> list[int]:
    offsets = torch.tensor([0, *(len(mask) for mask in masks)]).cumsum(0)
    return supervised_positions(torch.tensor([int(c) for c in "".join(masks)]), offsets).tolist()


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        (("00011110",), [3, 4, 5]),  # prompt, answer of four tokens, one token of glue
        (("0001111",), [3, 4, 5]),  # the row ends with the answer: its last token has no label
        (("00010",), []),  # an answer of one token has no label: the target chose its only token
        (("0011001110",), [2, 6, 7]),  # two turns: nothing crosses the turn of the user
        (("1111",), [1, 2]),  # no feature precedes the first token
        (("0011", "0111"), [2, 5, 6]),  # flat indices; the label of a row is never in the next row
        (("011", "111"), [1, 4]),
        (("0000", "0"), []),
        (("", "011", ""), [1]),
        ((), []),
    ],
)
def test_supervised_are_fed_response_tokens_with_a_response_label(
    masks: tuple[str, ...], expected: list[int]
) -> None:
    assert positions(*masks) == expected


@given(st.lists(st.text(alphabet="01", max_size=12), max_size=5))
def test_supervision_of_packed_rows_is_that_of_each_row(masks: list[str]) -> None:
    expected, start = [], 0
    for mask in masks:
        expected += [start + p for p in range(1, len(mask) - 1) if mask[p] == mask[p + 1] == "1"]
        start += len(mask)
    assert positions(*masks) == expected


@given(st.text(alphabet="01", min_size=1, max_size=24))
def test_the_first_token_of_a_response_is_never_a_label(mask: str) -> None:
    labels = [p + 1 for p in positions(mask)]
    assert not [p for p in labels if mask[p - 1] == "0" or mask[p] == "0"]


def make_shard(dtype: torch.dtype = torch.bfloat16) -> FeatureShard:
    h, masks = (
        4,
        ["00111", "001", "01110111"],
    )  # supervised: 2 3, none, 1 2 5 6
    loss_mask = torch.tensor([int(c) for c in "".join(masks)], dtype=torch.uint8)
    offsets = torch.tensor([0, 5, 8, 16])
    supervised = len(supervised_positions(loss_mask, offsets))
    generator = torch.Generator().manual_seed(0)
    return FeatureShard(
        input_ids=torch.arange(16, dtype=torch.int32) * 3,
        loss_mask=loss_mask,
        row_offsets=offsets,
        row_ids=torch.tensor([7, 2, 9]),
        aux=torch.randn(16, 3 * h, generator=generator).to(dtype),
        last=torch.randn(supervised, h, generator=generator).to(dtype),
        target_argmax=torch.arange(supervised, dtype=torch.int32),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_shard_read_back_is_the_same(dtype: torch.dtype, tmp_path) -> None:
    shard = make_shard(dtype)
    (tmp_path / "s.safetensors").write_bytes(shard.to_bytes())
    for read in (
        FeatureShard.from_file(tmp_path / "s.safetensors"),
        FeatureShard.from_bytes(shard.to_bytes()),
    ):
        for field in dataclasses.fields(FeatureShard):
            torch.testing.assert_close(getattr(read, field.name), getattr(shard, field.name), rtol=0, atol=0)


def test_rows_carry_their_own_part_of_every_tensor() -> None:
    shard = make_shard()
    first, middle, final = shard.rows()
    assert [row.row_id for row in (first, middle, final)] == [7, 2, 9]
    assert final.input_ids.tolist() == [24, 27, 30, 33, 36, 39, 42, 45]
    assert [row.supervised.tolist() for row in (first, middle, final)] == [[2, 3], [], [1, 2, 5, 6]]
    assert [row.target_argmax.tolist() for row in (first, middle, final)] == [[0, 1], [], [2, 3, 4, 5]]
    assert torch.equal(final.last, shard.last[2:])
    assert torch.equal(final.aux, shard.aux[8:])


def test_size_is_as_stated() -> None:
    shard = make_shard()
    data = shard.to_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    assert (
        len(data) - header
        == shard_bytes(rows=3, tokens=16, supervised=6, hidden_size=4, bytes_per_number=2) + 8
    )
    assert header < 1024


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("last", torch.zeros(7, 4), "last has shape"),
        ("aux", torch.zeros(16, 8), "aux has shape"),
        ("target_argmax", torch.zeros(2, dtype=torch.int32), "target_argmax has shape"),
        ("loss_mask", torch.ones(16, dtype=torch.uint8), "last has shape"),
        ("row_offsets", torch.tensor([0, 8, 5, 16]), "row_offsets do not ascend"),
        ("row_offsets", torch.tensor([0, 5, 8, 15]), "row_offsets do not run from 0 to 16"),
        ("row_ids", torch.tensor([1, 2]), "3 rows but row_ids"),
        ("input_ids", torch.zeros(16), "input_ids is torch.float32"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(field: str, value: torch.Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(make_shard(), **{field: value})


def test_a_file_that_is_no_shard_is_named_in_one_line(tmp_path) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(make_shard().to_bytes()[:100])
    with pytest.raises(EagleError, match=r"odd\.safetensors is not a feature shard \(") as error:
        FeatureShard.from_file(path)
    assert "\n" not in str(error.value)
