"""What runs a target to take its states."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Protocol

from stages.features.probe import probe
from stages.features.states import States, TokenBatch, target_states
from stages.features.storage import StorageFormat
from stages.targets import FeatureTaps, Target

PRIMITIVES = 32
"""Matrix products that oneDNN and PyTorch keep prepared, each. By default it is 1,024 a cache, of half a
megabyte; every batch has a shape of its own, so that is what they would grow to."""


class StatesEngine(Protocol):
    """Takes the states of a target at its feature layers and behind its final norm."""

    def states(self, batches: Iterable[TokenBatch]) -> Iterator[tuple[TokenBatch, States]]:
        """Each batch with its states, in order; an engine may read a few batches ahead.

        `States.wait` is the caller's to call.

        Raises:
            EagleError: the states cannot be had.
        """

    def close(self) -> None:
        """Frees what the engine holds; the target stays usable. Again is nothing."""


class TransformersStates:
    """The target itself, one forward pass a batch."""

    def __init__(
        self,
        target: Target,
        layers: tuple[int, int, int],
        storage: StorageFormat,
        every_last: bool = False,
    ) -> None:
        for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):  # read at their first use
            os.environ.setdefault(name, str(PRIMITIVES))
        self._target = target
        self._layers = layers
        self._storage = storage
        self._every_last = every_last
        self._taps = FeatureTaps(target.decoder, layers)
        self._probed = False

    def states(self, batches: Iterable[TokenBatch]) -> Iterator[tuple[TokenBatch, States]]:
        """A batch is handed out when the next one has been launched: a GPU works on while the CPU copies.

        Raises:
            EagleError: the first tokens show that this is no target whose states a head can learn from.
        """
        before: tuple[TokenBatch, States] | None = None
        for batch in batches:
            if not self._probed:
                probe(self._target, self._taps, self._layers, batch.input_ids[: batch.row_offsets[1]].long())
                self._probed = True
            states = target_states(self._target, self._taps, batch, self._storage, self._every_last)
            launched = batch, states
            if before is not None:
                yield before
            before = launched
        if before is not None:
            yield before

    def close(self) -> None:
        self._taps.close()
