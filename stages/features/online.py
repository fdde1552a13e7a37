"""Features that the target computes when they are needed, so that no disk has to hold them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stages.artifacts import Artifact, Parent, TargetFingerprint
from stages.features.config import FeatureSettings
from stages.features.extraction import Extractor, plan_extraction
from stages.features.index import RowIndex, ShardIndex
from stages.features.layout import FeatureRow, FeatureShard, supervised_positions
from stages.features.source import WINDOW_BYTES
from stages.features.target_files import target_weights
from stages.features.token_rows import TokenRow
from stages.progress import Reporter
from stages.targets import Target

_MEMORY_SHARE = 4


class OnlineFeatures:
    """Shard n is what extracting with these settings would have written as shard n, computed when opened.

    It is in memory while it is open. Nothing is computed ahead: the device is the one that trains.
    """

    def __init__(
        self, conversations: Artifact, target: Target, settings: FeatureSettings, report: Reporter
    ) -> None:
        """Plans the shards; reads the conversations' loss masks.

        Raises:
            EagleError: the conversations are another target's, or teach nothing, or the settings do not fit.
        """
        self._conversations = conversations
        self._target = target
        self._extraction = plan_extraction(settings, target, conversations)
        self._report = report
        self._lock = threading.Lock()
        self._running = ExitStack()
        self._extractor: Extractor | None = None
        self._closed = False

    @property
    def parents(self) -> tuple[Parent, ...]:
        return (self._conversations.parent(),)

    @property
    def target(self) -> TargetFingerprint:
        return self._target.fingerprint

    @property
    def settings(self) -> dict[str, Any]:
        return {"online": self._extraction.settings}

    @property
    def feature_layers(self) -> tuple[int, int, int]:
        return self._extraction.layers

    @cached_property
    def shards(self) -> tuple[ShardIndex, ...]:
        """Reads the conversations once more, for their labels."""
        kept = self._extraction.plan.rows
        rows = self._extraction.conversations.read(0, len(kept))
        labels = [_labels(row, each.length) for row, each in zip(rows, kept, strict=True)]
        return tuple(self._index(number, labels) for number in range(len(self._extraction.shards)))

    def _index(self, number: int, labels: Sequence[Tensor]) -> ShardIndex:
        row_ids = self._extraction.row_ids(number)
        kept = [self._extraction.plan.rows[row_id] for row_id in row_ids]
        return ShardIndex(
            rows=tuple(
                RowIndex(number, position, row_id, row.length, row.supervised)
                for position, (row_id, row) in enumerate(zip(row_ids, kept, strict=True))
            ),
            labels=torch.cat([labels[row_id] for row_id in row_ids]),
            bytes=self._extraction.shards[number].sizes.bytes,
        )

    @property
    def window_bytes(self) -> int:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(WINDOW_BYTES, memory // _MEMORY_SHARE)

    @cached_property
    def target_config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self._target.config.to_json_string())  # as it would be written
        return config

    def target_weights(self) -> dict[str, Tensor]:
        weights = target_weights(self._target)
        return {"lm_head.weight": weights["embed_tokens.weight"]} | weights

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Nothing."""

    @contextmanager
    def open(self, number: int) -> Iterator[Sequence[FeatureRow]]:
        with self._lock:
            if self._extractor is None:
                self._extractor = self._running.enter_context(self._extraction.running())
            shard = self._compute(self._extractor, number)
        yield list(shard.rows())

    def _compute(self, extractor: Extractor, number: int) -> FeatureShard:
        tokens = self._extraction.sizes[number].tokens
        with self._report.task(f"features {number}", total=tokens, unit="tok") as task:

            def advance(done: int) -> None:
                if self._closed:
                    raise RuntimeError("features are closed while a shard is computed")
                task.advance(done)

            return extractor.shard(number, advance)

    def close(self) -> None:
        self._closed = True  # an `open` in another thread ends after the batch that it is at
        with self._lock:
            self._extractor = None
            self._running.close()


def _labels(row: TokenRow, length: int) -> Tensor:
    """int32: the token after each supervised position of a row that ends after `length` tokens."""
    mask = torch.tensor(row.loss_mask[:length])
    positions = supervised_positions(mask, torch.tensor([0, length]))
    return torch.tensor(row.input_ids[:length])[positions + 1]
