"""Which drafter a person asks for, in one word: ``eagle3``, ``ngram:min=2,max=4``, ``draft:MODEL``,
``oracle:0.8``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from stages.decoding.drafters.calibration import Calibrations
from stages.decoding.drafters.draft_model import ModelDrafter
from stages.decoding.drafters.drafter import Drafter, NoDrafter
from stages.decoding.drafters.eagle import EagleDrafter
from stages.decoding.drafters.medusa import MedusaDrafter
from stages.decoding.drafters.ngram import NgramDrafter
from stages.decoding.drafters.oracle import OracleDrafter
from stages.errors import EagleError
from stages.heads import DraftHead, MedusaHead
from stages.targets import Target, load_target

DrafterKind = Literal["none", "eagle3", "eagle1", "medusa", "ngram", "draft", "oracle"]
_HEADS = ("eagle3", "eagle1", "medusa")
_EXAMPLES = "none, eagle3, eagle1, medusa, ngram:min=2,max=4, draft:MODEL or oracle:0.8"


@dataclass(frozen=True)
class DrafterChoice:
    """model: of ``draft``, as ``load_target`` takes it; least, most: tokens that ``ngram`` matches; right:
    the chance of ``oracle``."""

    kind: DrafterKind
    model: str = ""
    least: int = 2
    most: int = 4
    right: float = 0.0

    @classmethod
    def parse(cls, text: str) -> DrafterChoice:
        """Raises EagleError: the kind is unknown, or what follows it does not belong to it."""
        name, colon, rest = text.partition(":")
        if name not in get_args(DrafterKind):
            raise EagleError(f"unknown drafter {name!r}; use {_EXAMPLES}")
        if name == "draft":
            if not rest:
                raise EagleError("drafter draft needs a model: draft:FOLDER, or a hub id")
            return cls("draft", model=rest)
        if name == "oracle":
            try:
                right = float(rest)
            except ValueError:
                right = -1.0
            if not 0.0 <= right <= 1.0:
                raise EagleError(f"drafter {text!r}: oracle takes a probability, as in oracle:0.8")
            return cls("oracle", right=right)
        if name == "ngram":
            return cls._ngram(rest, text)
        if colon:
            raise EagleError(f"drafter {text!r}: {name} takes no settings")
        return cls(name)  # type: ignore[arg-type]

    @classmethod
    def _ngram(cls, rest: str, text: str) -> DrafterChoice:
        names = {"min": "least", "max": "most"}
        settings: dict[str, int] = {}
        for item in filter(None, rest.split(",")):
            key, _, value = item.partition("=")
            if key not in names or not value.isdecimal():
                raise EagleError(f"drafter {text!r}: ngram takes min and max, as in ngram:min=2,max=4")
            settings[names[key]] = int(value)
        choice = cls("ngram", **settings)  # type: ignore[arg-type]
        if not 1 <= choice.least <= choice.most:
            raise EagleError(f"drafter {text!r}: min is at least 1 and max no less than min")
        return choice

    def __str__(self) -> str:
        settings = {
            "draft": self.model,
            "oracle": f"{self.right:g}",
            "ngram": f"min={self.least},max={self.most}",
        }.get(self.kind)
        return self.kind if settings is None else f"{self.kind}:{settings}"


def make_drafter(
    choice: DrafterChoice,
    target: Target,
    head: DraftHead | None = None,
    *,
    slots: int = 1,
    calibrations: Calibrations | None = None,
) -> Drafter:
    """The drafter asked for.

    Args:
        head: of the kind asked for, where it is one of the heads.
        slots: sequences that it follows at most, numbered from 0.

    Raises:
        EagleError: the head is missing or of another kind, or the draft model cannot be used.
    """
    if choice.kind in _HEADS:
        if head is None or head.kind != choice.kind:
            given = "none was given" if head is None else f"the one given is {head.kind}"
            raise EagleError(f"drafter {choice.kind} needs a head of that kind, and {given}")
        if isinstance(head, MedusaHead):
            return MedusaDrafter(head, calibrations=calibrations)
        return EagleDrafter(head, slots=slots, calibrations=calibrations)
    if choice.kind == "ngram":
        return NgramDrafter(choice.least, choice.most, calibrations=calibrations)
    if choice.kind == "draft":
        dtype = str(target.dtype).removeprefix("torch.")
        model = load_target(choice.model, device=target.device.type, dtype=dtype)
        return ModelDrafter(model, target, slots=slots, calibrations=calibrations)
    if choice.kind == "oracle":
        return OracleDrafter(choice.right, target.vocab_size)
    return NoDrafter()


def drafter_of(head: DraftHead | None) -> DrafterChoice:
    """The drafter that goes with a head, none without one."""
    return DrafterChoice("none" if head is None else head.kind)
