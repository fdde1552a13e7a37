"""Claims about the features format: which positions are supervised, and that shards hold what they say."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import EagleError
from stages.features.layout import FeatureShard, ShardSizes, supervised_positions
from stages.features.storage import FP8, StorageFormat


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


STORAGE = [StorageFormat(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, FP8)]


def make_shard(storage: StorageFormat = STORAGE[0]) -> FeatureShard:
    h, masks = (
        4,
        ["00111", "001", "01110111"],
    )  # supervised: 2 3, none, 1 2 5 6
    loss_mask = torch.tensor([int(c) for c in "".join(masks)], dtype=torch.uint8)
    offsets = torch.tensor([0, 5, 8, 16])
    supervised = len(supervised_positions(loss_mask, offsets))
    generator = torch.Generator().manual_seed(0)
    aux, aux_scale = storage.pack(torch.randn(16, 3 * h, generator=generator), taps=3)
    last, last_scale = storage.pack(torch.randn(supervised, h, generator=generator), taps=1)
    return FeatureShard(
        input_ids=torch.arange(16, dtype=torch.int32) * 3,
        loss_mask=loss_mask,
        row_offsets=offsets,
        row_ids=torch.tensor([7, 2, 9]),
        aux=aux,
        last=last,
        target_argmax=torch.arange(supervised, dtype=torch.int32),
        aux_scale=aux_scale,
        last_scale=None if last_scale is None else last_scale.squeeze(1),
    )


@pytest.mark.parametrize("storage", STORAGE, ids=lambda storage: storage.name)
def test_a_shard_read_back_is_the_same_and_has_the_size_that_was_stated(
    storage: StorageFormat, tmp_path
) -> None:
    shard = make_shard(storage)
    data = shard.to_bytes()
    (tmp_path / "s.safetensors").write_bytes(data)
    for read in (FeatureShard.from_file(tmp_path / "s.safetensors"), FeatureShard.from_bytes(data)):
        for field in dataclasses.fields(FeatureShard):
            found, expected = getattr(read, field.name), getattr(shard, field.name)
            assert (found is None) == (expected is None), field.name
            if found is not None:
                assert found.dtype == expected.dtype
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), field.name
    assert len(data) == ShardSizes(3, 16, 6, 4, storage).bytes
    per_number, per_vector = storage.dtype.itemsize, 4 if storage.scaled else 0
    numbers = (
        16 * (5 + 12 * per_number + 3 * per_vector) + 6 * (4 + 4 * per_number + per_vector) + 4 * 8 + 3 * 8
    )
    assert 0 < len(data) - numbers < 1024


def test_rows_carry_their_own_part_of_every_tensor() -> None:
    shard = make_shard()
    first, middle, final = shard.rows()
    assert [row.row_id for row in (first, middle, final)] == [7, 2, 9]
    assert final.input_ids.tolist() == [24, 27, 30, 33, 36, 39, 42, 45]
    assert [row.supervised.tolist() for row in (first, middle, final)] == [[2, 3], [], [1, 2, 5, 6]]
    assert [row.target_argmax.tolist() for row in (first, middle, final)] == [[0, 1], [], [2, 3, 4, 5]]
    assert torch.equal(final.last, shard.last[2:])
    assert torch.equal(final.aux, shard.aux[8:])


def test_rows_of_an_fp8_shard_have_their_states_to_calculate_with() -> None:
    exact, packed = list(make_shard(STORAGE[2]).rows()), list(make_shard(StorageFormat(FP8)).rows())
    for row, expected in zip(packed, exact, strict=True):
        assert (row.aux.dtype, row.last.dtype) == (torch.bfloat16, torch.bfloat16)
        torch.testing.assert_close(row.aux.float(), expected.aux, rtol=0.08, atol=1e-3)
        torch.testing.assert_close(row.last.float(), expected.last, rtol=0.08, atol=1e-3)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("last", torch.zeros(7, 4, dtype=torch.bfloat16), "last has shape"),
        ("last", torch.zeros(6, 4), "aux is torch.bfloat16 and last torch.float32"),
        ("aux", torch.zeros(16, 8, dtype=torch.bfloat16), "aux has shape"),
        ("aux_scale", torch.zeros(16, 3), "aux_scale and states of torch.bfloat16 do not go together"),
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
