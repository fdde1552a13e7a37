"""Where training reads features from: a protocol, and features that were extracted beforehand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from stages.artifacts import Artifact, Parent, TargetFingerprint
from stages.artifacts.cache import cache_limit
from stages.artifacts.uri import local_path
from stages.features.index import ShardIndex, read_index
from stages.features.layout import TARGET_FOLDER, FeatureRow, FeatureShard, read_target_weights

READS_AT_ONCE = 16
"""Shards whose index is read at the same time: each takes a few requests, which wait for the network."""

WINDOW_BYTES = 8 << 30


class FeatureSource(Protocol):
    """Rows of features in shards, of which a few are open at a time, and what training needs of the target.

    The same target, conversations and settings give the same shards from every source: the same rows in the
    same order with the same numbers. `open` and `prefetch` may be called from several threads.
    """

    @property
    def parents(self) -> tuple[Parent, ...]:
        """The artifacts that the rows come from."""

    @property
    def target(self) -> TargetFingerprint | None: ...

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the rows beside parents and target: nothing where the parents are features."""

    @property
    def feature_layers(self) -> tuple[int, int, int]: ...

    @property
    def shards(self) -> tuple[ShardIndex, ...]: ...

    @property
    def window_bytes(self) -> int:
        """Most features to hold at a time, in bytes."""

    @property
    def target_config(self) -> dict[str, Any]:
        """The target's config.json."""

    def target_weights(self) -> dict[str, Tensor]:
        """`embed_tokens.weight`, `lm_head.weight` (the embeddings when tied), `norm.weight`, any biases."""

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Says which shards will be opened soon, in this order; returns at once."""

    def open(self, number: int) -> AbstractContextManager[Sequence[FeatureRow]]:
        """All rows of a shard. They stay valid while it is open, and are read from disk as they are used.

        Raises:
            EagleError: the shard is damaged, or cannot be had.
        """

    def close(self) -> None:
        """Ends what `prefetch` began, and an `open` in another thread. Nothing is opened after it."""


class OfflineFeatures:
    """A features artifact: a local one is mapped where it is, of a remote one a few shards are cached."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact

    @property
    def parents(self) -> tuple[Parent, ...]:
        return (self._artifact.parent(),)

    @property
    def target(self) -> TargetFingerprint | None:
        return self._artifact.manifest.target

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    @property
    def feature_layers(self) -> tuple[int, int, int]:
        low, mid, high = self._artifact.manifest.config["feature_layers"]
        return low, mid, high

    @cached_property
    def shards(self) -> tuple[ShardIndex, ...]:
        """Read when first asked for, without the states.

        Raises:
            EagleError: a shard is damaged, or cannot be read.
        """
        numbers = range(len(self._artifact.manifest.shards))
        with ThreadPoolExecutor(READS_AT_ONCE) as readers:
            return tuple(readers.map(lambda number: read_index(self._artifact, number), numbers))

    @property
    def window_bytes(self) -> int:
        """Two windows fit into the cache, so that one can be fetched while the other is read."""
        if local_path(self._artifact.uri) is not None:
            return WINDOW_BYTES
        return min(WINDOW_BYTES, cache_limit() // 2)

    @cached_property
    def target_config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self._artifact.read(f"{TARGET_FOLDER}/config.json"))
        return config

    def target_weights(self) -> dict[str, Tensor]:
        return read_target_weights(self._artifact)

    def prefetch(self, numbers: Sequence[int]) -> None:
        self._artifact.prefetch([self._path(number) for number in numbers])

    @contextmanager
    def open(self, number: int) -> Iterator[Sequence[FeatureRow]]:
        with self._artifact.pinned(self._path(number)) as path:
            yield list(FeatureShard.from_file(path).rows())

    def close(self) -> None:
        self._artifact.prefetch([])

    def _path(self, number: int) -> str:
        return self._artifact.manifest.shards[number].path
