"""Several features artifacts as one: more data added to a first set, or answers at other temperatures."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

from torch import Tensor

from stages.artifacts import Artifact, Parent, TargetFingerprint
from stages.config import several
from stages.errors import EagleError
from stages.features.index import ShardIndex
from stages.features.layout import FeatureRow
from stages.features.source import FeatureSource, OfflineFeatures

_ROW_ID_BITS = 40
"""Row ids of the artifact at place n have n in the bits above these, so that those of the first stay."""


MOST_SHARED = 0.1
"""Of the rows of the smaller artifact: short answers may be the same by chance."""


class JoinedFeatures:
    """The rows of all sources, those of the first before those of the second.

    Shards are numbered through. A row's id says which source it is from, as two conversations may have the
    same number. Target weights are those of the first.
    """

    def __init__(self, sources: Sequence[FeatureSource]) -> None:
        self._sources = sources

    @property
    def parents(self) -> tuple[Parent, ...]:
        return tuple(chain.from_iterable(source.parents for source in self._sources))

    @property
    def target(self) -> TargetFingerprint | None:
        return self._sources[0].target

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    @property
    def feature_layers(self) -> tuple[int, int, int]:
        return self._sources[0].feature_layers

    @cached_property
    def shards(self) -> tuple[ShardIndex, ...]:
        return tuple(
            replace(
                shard,
                rows=tuple(
                    replace(row, shard=first + row.shard, row_id=_joined_id(place, row.row_id))
                    for row in shard.rows
                ),
            )
            for place, (first, source) in enumerate(zip(self._firsts, self._sources, strict=True))
            for shard in source.shards
        )

    @property
    def window_bytes(self) -> int:
        return min(source.window_bytes for source in self._sources)

    @property
    def target_config(self) -> dict[str, Any]:
        return self._sources[0].target_config

    def target_weights(self) -> dict[str, Tensor]:
        return self._sources[0].target_weights()

    def prefetch(self, numbers: Sequence[int]) -> None:
        places = [self._place(number) for number in numbers]
        for own, source in enumerate(self._sources):
            source.prefetch([number for place, number in places if place == own])

    @contextmanager
    def open(self, number: int) -> Iterator[Sequence[FeatureRow]]:
        place, own = self._place(number)
        with self._sources[place].open(own) as rows:
            yield [replace(row, row_id=_joined_id(place, row.row_id)) for row in rows]

    def close(self) -> None:
        for source in self._sources:
            source.close()

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """The number of each source's first shard."""
        return tuple(accumulate((len(source.shards) for source in self._sources[:-1]), initial=0))

    def _place(self, number: int) -> tuple[int, int]:
        """The source that shard `number` is of, and its number there."""
        place = bisect_right(self._firsts, number) - 1
        return place, number - self._firsts[place]


def offline_features(artifacts: Sequence[Artifact]) -> FeatureSource:
    """The rows of one features artifact, or of several together.

    Raises:
        EagleError: two of them cannot be learned from together: they are of another target or other layers,
            or hold the same conversations, of which some would be trained on and held out.
    """
    sources = [OfflineFeatures(artifact) for artifact in artifacts]
    if len(sources) == 1:
        return sources[0]
    for place, (artifact, source) in enumerate(zip(artifacts, sources, strict=True)):
        for earlier, before in zip(artifacts[:place], sources, strict=False):
            _require_together(earlier, before, artifact, source)
    return JoinedFeatures(sources)


def _require_together(
    first: Artifact, first_source: FeatureSource, second: Artifact, second_source: FeatureSource
) -> None:
    both = f"{first.uri} and {second.uri}"
    if first.manifest.digest == second.manifest.digest:
        raise EagleError(f"{both} hold the same rows: give each features artifact once")
    parents = [{parent.digest for parent in artifact.manifest.parents} for artifact in (first, second)]
    if parents[0] & parents[1]:
        raise EagleError(
            f"{both} are of the same conversations, so what is held out of one would be trained on in the "
            "other: leave one out"
        )
    if first_source.target and second_source.target:
        differ = first_source.target.mismatch(second_source.target)
        if differ:
            raise EagleError(
                f"{both} are of different targets (they differ in {', '.join(differ)}): extract both with "
                "the same target and --dtype"
            )
    if first_source.feature_layers != second_source.feature_layers:
        raise EagleError(
            f"{both} are of other layers, {list(first_source.feature_layers)} and "
            f"{list(second_source.feature_layers)}: extract both with the same --layers"
        )
    answers, others = _answers(first_source), _answers(second_source)
    if len(answers & others) > MOST_SHARED * min(len(answers), len(others)):
        raise EagleError(
            f"{both} share {several(len(answers & others), 'answer')}, so what is held out of one would be "
            "trained on in the other: leave one out, or make the second of other prompts"
        )


def _answers(source: FeatureSource) -> set[bytes]:
    """The tokens that the target answered in each row: those of a set that was made again, or made longer,
    are the same although its digest is another."""
    return {
        labels.numpy().tobytes()
        for shard in source.shards
        for labels in shard.labels.split([row.supervised for row in shard.rows])
    }


def place_of(row_id: int) -> tuple[int, int]:
    """Which of several artifacts a row is from, counted from 0, and the row's id there."""
    return row_id >> _ROW_ID_BITS, row_id & ((1 << _ROW_ID_BITS) - 1)


def _joined_id(place: int, row_id: int) -> int:
    return (place << _ROW_ID_BITS) + row_id
