"""The drafters of a run, side by side on one target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, get_args

from stages.artifacts import Artifact
from stages.bench.config import DRAFTERS, BenchConfig
from stages.bench.contestant import PLAIN, WITH_TREE, Contestant, InProcess
from stages.bench.transformers_generate import KIND, Generate, GenerateChoice
from stages.decoding import DrafterChoice, EagleModel, TreeConfig
from stages.decoding.drafters import DrafterKind
from stages.errors import EagleError
from stages.heads import DraftHead, load_head
from stages.targets import Target, load_target
from stages.targets.chat_template import with_chat_template

_HEADS = ("eagle3", "eagle1", "medusa")


@dataclass(frozen=True)
class Entry:
    """One drafter under a name of its own; `head` is its place among the heads."""

    name: str
    choice: DrafterChoice
    head: int | None = None


@dataclass(frozen=True)
class Drafters:
    """What `--drafters` names: drafters of our engine, and ways to call transformers' generate."""

    choices: list[DrafterChoice]
    generates: list[GenerateChoice]


@dataclass
class LineUp:
    """A target with the drafters for it.

    models: by name; plain decoding is PLAIN, where it is asked for.
    main: the drafter that is compared with plain decoding one request at a time.
    others: contestants that are not our engine.
    """

    target: Target
    models: dict[str, EagleModel]
    main: str
    others: list[Contestant] = field(default_factory=list)

    @property
    def model(self) -> EagleModel:
        return self.models[self.main]

    def contestants(self) -> list[Contestant]:
        return [*(InProcess(name, model) for name, model in self.models.items()), *self.others]

    def release(self) -> None:
        """Forget the models, to make room for others."""
        self.models.clear()
        self.others.clear()
        del self.target


def parse_drafters(text: str) -> Drafters:
    """`none,ngram:min=2,max=4,eagle3` is three of them.

    Raises:
        EagleError: one is unknown, or nothing is to be compared with plain decoding.
    """
    parts: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        setting = "=" in part and part.partition(":")[0] not in (*get_args(DrafterKind), KIND)
        if setting and parts:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    generates = [GenerateChoice.parse(part) for part in parts if part.partition(":")[0] == KIND]
    if len({each.name for each in generates}) < len(generates):
        raise EagleError(f"--drafters {text} names {KIND} twice in the same way: give each once")
    ours = [part for part in parts if part.partition(":")[0] != KIND]
    for part in ours:
        if part.partition(":")[0] not in get_args(DrafterKind):
            raise EagleError(f"--drafters {text}: there is no {part!r}; name some of {DRAFTERS}")
    choices = [DrafterChoice.parse(part) for part in ours]
    if choices and all(choice.kind == "none" for choice in choices):
        raise EagleError(
            f"--drafters {text} leaves nothing to compare with plain decoding: add ngram or eagle3"
        )
    return Drafters(choices, generates)


def enter(choices: Sequence[DrafterChoice], kinds: Sequence[str]) -> list[Entry]:
    """Who takes part besides plain decoding, which always does: the drafters asked for, or else every head;
    heads come first.

    Args:
        kinds: of the heads, in the order they were given.

    Raises:
        EagleError: a head is missing, or one is not asked for.
    """
    wanted = [choice for choice in choices if choice.kind != "none"] or [
        DrafterChoice(kind)  # type: ignore[arg-type]
        for kind in dict.fromkeys(kinds)
    ]
    if not wanted:
        raise EagleError("--drafters leaves nothing of ours to compare with plain decoding: add ngram")
    entries: list[Entry] = []
    for choice in wanted:
        heads: list[int | None] = [None]
        if choice.kind in _HEADS:
            heads = [i for i, kind in enumerate(kinds) if kind == choice.kind]
            if not heads:
                given = f"those given are {', '.join(kinds)}" if kinds else "none was given"
                raise EagleError(f"drafter {choice.kind} needs a --head of that kind, and {given}")
        for head in heads:
            entries.append(Entry(_name(choice, [entry.name for entry in entries]), choice, head))
    entries.sort(key=lambda entry: entry.head is None)  # a head is what is compared with plain decoding
    for i, kind in enumerate(kinds):
        if all(entry.head != i for entry in entries):
            raise EagleError(f"a --head is of kind {kind}, which --drafters does not name: add {kind}")
    return entries


def load_line_up(
    config: BenchConfig, heads: Sequence[Artifact], dtype: str, *, only_main: bool = False
) -> LineUp:
    """Plain decoding, if there is a sweep, and every drafter; `only_main`: nothing but the main one.

    Raises:
        EagleError: something cannot be loaded, or a head was trained for another target.
    """
    trees, drafters = [TreeConfig.parse(tree) for tree in config.tree], parse_drafters(config.drafters)
    target = with_chat_template(load_target(config.target, config.device, dtype), config.chat_template)
    for artifact in heads:
        artifact.require_target(target.fingerprint, "the target", ignore=("dtype",))
    loaded = [load_head(artifact, dtype=target.dtype, device=target.device) for artifact in heads]
    entries = enter(drafters.choices, [head.kind for head in loaded])
    batch = 1 if only_main else max(config.levels, default=1)
    models = {}
    if config.levels and not only_main:
        models[PLAIN] = EagleModel(target, max_batch=batch)
    pairs = [(entry, tree) for entry in entries for tree in trees]
    for entry, tree in pairs[:1] if only_main else pairs:
        head: DraftHead | None = None if entry.head is None else loaded[entry.head]
        name = entry.name if len(trees) == 1 else f"{entry.name}{WITH_TREE}{tree}"
        models[name] = EagleModel(target, head, tree, entry.choice, max_batch=batch)
    line_up = LineUp(target, models, next(name for name in models if name != PLAIN))
    if drafters.generates and not only_main:
        plain: Any = load_target(config.target, config.device, dtype, decodes=False).model
        line_up.others = [Generate(target, plain, choice) for choice in drafters.generates]
    return line_up


def _name(choice: DrafterChoice, taken: Sequence[str]) -> str:
    stem = choice.kind if choice.kind != "draft" else f"draft:{PurePath(choice.model).name}"
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name
