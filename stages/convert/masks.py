"""The loss masks of speculators' hidden states, which its prepared dataset has and their files have not.

The dataset is a folder as `datasets.Dataset.save_to_disk` writes it: `state.json` names Arrow stream files,
whose rows have `input_ids` and `loss_mask`. Hidden states `hs_<n>.safetensors` belong to row n.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from pyarrow import ipc
from torch import Tensor

from stages.artifacts import join
from stages.artifacts.uri import storage_errors
from stages.convert.source import Source, open_source
from stages.errors import EagleError

STATE = "state.json"  # has a fingerprint of the dataset's content, too
_COLUMNS = ("input_ids", "loss_mask")


@dataclass(frozen=True)
class MaskedRow:
    """One row of the dataset: its tokens, and 1 where a token is part of an answer."""

    input_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] int64


def find_dataset(source: Source, given: str | None) -> Source:
    """The prepared dataset: where the user says, else the source itself, else the folder that it is in.

    Raises:
        EagleError: there is none.
    """
    if given is not None:
        dataset = open_source(given)
        if STATE not in dataset.sizes:
            raise EagleError(f"{given} is no prepared dataset, it has no {STATE}: see --dataset")
        return dataset
    if STATE in source.sizes:
        return source
    above = source.uri.rstrip("/").rpartition("/")[0]
    name = source.root.rsplit("/", 1)[-1]
    if above and not above.endswith((":", "/")) and name == "hidden_states":
        dataset = open_source(above)
        if STATE in dataset.sizes:
            return dataset
    raise EagleError(
        f"{source.uri} has hidden states and no loss masks: give the folder that speculators' "
        "prepare_data.py wrote as --dataset"
    )


class LossMasks:
    """Rows by ascending number, of which one batch of the dataset is in memory at a time."""

    def __init__(self, dataset: Source) -> None:
        """Raises EagleError: the dataset's state is unreadable."""
        self._uri = dataset.uri
        self._dataset = dataset
        self._batches = self._read(data_files(dataset))
        self._first = 0
        self._batch: pa.RecordBatch | None = None

    def row(self, number: int) -> MaskedRow | None:
        """Row `number`, which must not be before the last one asked for; None when there are not that many.

        Raises:
            EagleError: the dataset is damaged or lacks a column.
        """
        assert number >= self._first
        while self._batch is None or number >= self._first + self._batch.num_rows:
            self._first += self._batch.num_rows if self._batch is not None else 0
            self._batch = next(self._batches, None)
            if self._batch is None:
                return None
        at = number - self._first
        columns = [
            torch.from_numpy(np.asarray(self._batch.column(name)[at].values, dtype=np.int64).copy())
            for name in _COLUMNS
        ]
        return MaskedRow(*columns)

    def _read(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        for name in names:
            where = join(self._uri, name)
            try:
                with (
                    storage_errors(where),
                    self._dataset.stream(name) as file,
                    ipc.open_stream(file) as batches,
                ):
                    for batch in batches:
                        if missing := [each for each in _COLUMNS if each not in batch.schema.names]:
                            raise EagleError(
                                f"{where} has no column {' and '.join(missing)}: give the folder that "
                                "speculators' prepare_data.py wrote as --dataset"
                            )
                        yield batch
            except pa.ArrowException as error:
                raise EagleError(f"{where} cannot be read: {' '.join(str(error).split())}") from None


def data_files(dataset: Source) -> list[str]:
    """The dataset's files in order.

    Raises:
        EagleError: its state does not name them, or names files that are not there.
    """
    try:
        state = json.loads(dataset.read(STATE))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError):
        names = []
    if not names:
        raise EagleError(f"{join(dataset.uri, STATE)} does not name the dataset's files")
    if missing := [name for name in names if name not in dataset.sizes]:
        raise EagleError(
            f"{dataset.uri} has no {missing[0]}, which its {STATE} names: copy the whole dataset"
        )
    return names
