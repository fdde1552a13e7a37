"""The features of some conversations: planned once, then made shard by shard, in any order.

`eagle extract-features` writes the shards; training on the fly asks for them by number. Both get the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stages.artifacts import Artifact
from stages.config import several
from stages.errors import EagleError
from stages.features.config import FeatureSettings, parse_layers
from stages.features.engine import StatesEngine, TransformersStates
from stages.features.layout import FeatureShard, ShardSizes
from stages.features.plan import Plan, ShardPlan, plan_batches
from stages.features.shards import ShardBuilder
from stages.features.states import States, TokenBatch, token_batches
from stages.features.storage import StorageFormat
from stages.features.token_rows import TokenRow, TokenRows
from stages.targets import Target
from stages.targets.taps import check_feature_layers

Part = tuple[int, int]
"""(i, n): part i of n of a job array."""


@dataclass(frozen=True)
class Extraction:
    """What `plan_extraction` decided.

    Attributes:
        settings: what decides the result, as JSON values, for the manifest.
    """

    target: Target
    conversations: TokenRows
    plan: Plan
    storage: StorageFormat
    layers: tuple[int, int, int]
    shards: tuple[ShardPlan, ...]
    settings: dict[str, Any]
    every_last: bool = False  # the last states of all tokens are kept

    @property
    def sizes(self) -> tuple[ShardSizes, ...]:
        """Of each shard; `bytes` is that of its file."""
        return tuple(shard.sizes for shard in self.shards)

    @cached_property
    def bytes(self) -> int:
        """Of all shards."""
        return sum(sizes.bytes for sizes in self.sizes)

    def row_ids(self, shard: int) -> list[int]:
        """The conversations of a shard, in its order."""
        return [
            self.plan.first + index
            for batch in self.shards[shard].batches
            for index in self.plan.batches[batch]
        ]

    @contextmanager
    def running(self, engine: StatesEngine | None = None) -> Iterator[Extractor]:
        """The target at work; what it runs with is closed at the end.

        Args:
            engine: what runs the target, in this extraction's storage format; transformers by default.
        """
        engine = engine or TransformersStates(self.target, self.layers, self.storage, self.every_last)
        try:
            yield Extractor(self, engine)
        finally:
            engine.close()


class Extractor:
    """Makes shards of an `Extraction`, in any order. Get one from `Extraction.running`."""

    def __init__(self, extraction: Extraction, engine: StatesEngine) -> None:
        self._extraction = extraction
        self._engine = engine

    def shard(self, number: int, advance: Callable[[int], None] = lambda tokens: None) -> FeatureShard:
        """Runs the batches of a shard.

        Args:
            advance: called with the tokens of each batch that is done.

        Raises:
            EagleError: the target's states are nothing to learn from, or a shard of conversations is damaged.
        """
        shard = self._extraction.shards[number]
        builder = ShardBuilder(shard.sizes)
        for batch, states in self._states(shard.batches):
            builder.add(batch, states)
            advance(len(batch.input_ids))
        return builder.shard()

    def batch(self, number: int) -> States:
        """The states of one batch."""
        ((_, states),) = self._states(range(number, number + 1))
        states.wait()
        return states

    def _states(self, batches: range) -> Iterator[tuple[TokenBatch, States]]:
        extraction = self._extraction
        return self._engine.states(token_batches(extraction.conversations, extraction.plan, batches))


def plan_extraction(
    settings: FeatureSettings, target: Target, conversations: Artifact, part: Part | None = None
) -> Extraction:
    """Reads the loss masks of the conversations and decides what becomes of each.

    Args:
        target: of its layers nothing is used.
        part: only this part of the conversations, a run of about equal length of their numbers.

    Raises:
        EagleError: the conversations are another target's, are none, have ids that the target has not, or
            teach nothing; or the target is too short for `max_length` or `layers`.
    """
    conversations.require_target(target.fingerprint, "--target", ignore=("dtype",))
    rows = TokenRows(conversations)
    if not len(rows):
        raise EagleError(f"{conversations.uri} has no conversations: make them again with eagle gen-data")
    max_length = _max_length(settings, target)
    layers = _layers(settings, target)
    storage = StorageFormat.of(settings.storage_dtype, target.dtype)
    number, parts = part or (0, 1)
    start, stop = len(rows) * number // parts, len(rows) * (number + 1) // parts
    budget = settings.max_tokens
    if budget is not None:
        budget = budget * (number + 1) // parts - budget * number // parts
    plan = plan_batches(
        _checked(rows, start, stop, target),
        max_length,
        settings.forward_tokens,
        long_rows=settings.long_rows,
        max_tokens=budget,
        first=start,
        total=stop - start,
    )
    if not plan.kept_rows and part is None:
        raise EagleError(
            f"none of the {several(len(plan.rows), 'conversation')} in {conversations.uri} has two "
            "response tokens in a "
            "row to learn from: make conversations with longer answers, or raise --max-length"
        )
    decided = {
        "max_length": max_length,
        "long_rows": settings.long_rows,
        "max_tokens": settings.max_tokens,
        "forward_tokens": settings.forward_tokens,
        "shard_bytes": settings.shard_bytes,
        "storage_dtype": storage.name,
        "feature_layers": list(layers),
    }
    every_last = settings.last == "all"
    if every_last:
        decided["last"] = settings.last
    shards = plan.shards(target.hidden_size, storage, settings.shard_bytes, every_last)
    return Extraction(target, rows, plan, storage, layers, shards, decided, every_last)


def _max_length(settings: FeatureSettings, target: Target) -> int:
    if settings.max_length and settings.max_length > target.max_length:
        raise EagleError(
            f"--max-length {settings.max_length} is more than the target's context of {target.max_length}: "
            "leave it out or lower it"
        )
    return settings.max_length or target.max_length


def _layers(settings: FeatureSettings, target: Target) -> tuple[int, int, int]:
    if settings.layers is None:
        return target.feature_layers
    return check_feature_layers(parse_layers(settings.layers), target.config.num_hidden_layers)


def _checked(rows: TokenRows, start: int, stop: int, target: Target) -> Iterator[TokenRow]:
    """Conversations whose ids the target has embeddings for."""
    known = target.model.get_input_embeddings().weight.shape[0]
    for number, row in enumerate(rows.read(start, stop), start):
        if len(row.input_ids) and (row.input_ids.min() < 0 or row.input_ids.max() >= known):
            wrong = int(row.input_ids.min() if row.input_ids.min() < 0 else row.input_ids.max())
            raise EagleError(
                f"conversation {number} in {rows.artifact.uri} has the token id {wrong}, and {target.name} "
                f"has {known} tokens: use the target that made the conversations"
            )
        yield row
