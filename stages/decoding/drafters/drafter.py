"""What the engine asks of every drafter, and the drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, Protocol, TypeVar

from torch import Tensor

from stages.decoding.row_tensors import PlacedRows
from stages.decoding.sampling import SamplingParams
from stages.decoding.tree import DraftTree, TreePlan
from stages.targets import SlotCache

StateKind = Literal["none", "aux", "last"]
"""What a drafter wants of the target: nothing, the features [3h] of the tapped layers, or the state [h] after
the final norm."""


T = TypeVar("T")


class Drafter(Protocol):
    """Follows the sequences of a batch, each in its slot: learns what was verified, proposes what may come.

    A sequence x_0 x_1 ... is handed over as the pairs (f_i, x_{i+1}): the target's state at a token, and the
    token after it. Whatever ``state`` is, the first ``extend`` of a sequence begins with x_1 and every later
    one goes on where the last has ended: prompt first, then output.
    """

    state: StateKind
    passes: list[int]
    """Rows of each pass of the drafter's model in the last ``propose``."""

    rows: PlacedRows | None
    """Of the target's forward over the trees of the last ``propose``, where they have been made with them."""

    @property
    def cache(self) -> SlotCache | None:
        """Keys and values of the drafter's own model, if it has one."""

    def start(
        self,
        slot: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        known: int = 0,
        source: int | None = None,
    ) -> None:
        """A new sequence takes the slot.

        Args:
            known: pairs of the prompt that need not come, as those that ``source`` begins with are the same.
            source: the slot itself by default.
        """

    def extend(self, slots: Sequence[int], states: Tensor | None, tokens: Sequence[Sequence[int]]) -> None:
        """Take verified pairs; what was drafted before is dropped.

        Args:
            slots: distinct.
            states: [sum of the numbers of tokens, w], slot after slot; None where ``state`` is "none". Kept
                until the next ``propose``, so the caller must not overwrite them.
            tokens: of each slot, those that follow its states; the last becomes the root of the next tree.
        """

    def propose(self, slots: Sequence[int], plans: Sequence[TreePlan]) -> list[DraftTree]:
        """A tree below the last verified token of each slot."""


class Slots(Generic[T]):
    """Records of the sequences that a drafter follows."""

    def __init__(self) -> None:
        self._records: dict[int, T] = {}

    def __getitem__(self, slot: int) -> T:
        return self._records[slot]

    def put(self, slot: int, record: T) -> None:
        self._records[slot] = record


class NoDrafter:
    """Proposes nothing: plain decoding."""

    state: StateKind = "none"
    cache = None

    def __init__(self) -> None:
        self.passes: list[int] = []
        self.rows: PlacedRows | None = None
        self._roots: Slots[int] = Slots()

    def start(
        self,
        slot: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        known: int = 0,
        source: int | None = None,
    ) -> None:
        self._roots.put(slot, prompt_ids[-1])

    def extend(self, slots: Sequence[int], states: Tensor | None, tokens: Sequence[Sequence[int]]) -> None:
        for slot, new in zip(slots, tokens, strict=True):
            self._roots.put(slot, new[-1])

    def propose(self, slots: Sequence[int], plans: Sequence[TreePlan]) -> list[DraftTree]:
        return [DraftTree.root_only(self._roots[slot]) for slot in slots]
