"""Telling from the files of a folder which tool made them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from stages.artifacts import MANIFEST_NAME
from stages.convert.config import Format, Written
from stages.convert.source import Source
from stages.errors import EagleError

Kind = Literal["speculators", "speculators-pickles", "specforge", "head", "artifact"]

_SAMPLES: dict[Kind, re.Pattern[str]] = {
    "speculators": re.compile(r"(?:.*/)?hs_(\d+)\.safetensors"),
    "speculators-pickles": re.compile(r"(?:.*/)?data_(\d+)\.pt"),
    "specforge": re.compile(r"(?:.*/)?data_(\d+)\.ckpt(?:\.gz)?"),
}
_HEAD_WEIGHTS = re.compile(
    r"(?:model|pytorch_model)[^/]*\.(?:safetensors|bin)|medusa_lm_head\.(?:safetensors|pt)"
)
_KINDS: dict[Format, tuple[Kind, ...]] = {
    "auto": ("speculators", "speculators-pickles", "specforge", "head"),
    "speculators-features": ("speculators", "speculators-pickles"),
    "specforge-features": ("specforge",),
    "head": ("head",),
}
_READS = (
    "hidden states of speculators (hs_*.safetensors, data_*.pt) or of SpecForge (data_*.ckpt[.gz]), or a "
    "draft head (config.json beside model.safetensors, pytorch_model.bin or medusa_lm_head.pt)"
)


@dataclass(frozen=True)
class SampleFile:
    """One row of features in a file of its own; `number` is the one in its name."""

    name: str
    number: int


def recognise(source: Source, wanted: Format, to: Written = "eagle") -> Kind:
    """Which tool wrote the files, and whether they are hidden states or a head.

    Raises:
        EagleError: they are of no kind that can be converted, of more than one, or not of the `wanted` one.
    """
    if MANIFEST_NAME in source.sizes:
        if to == "eagle":
            raise EagleError(
                f"{source.uri} is an eagle artifact already: use it as it is, or say --to speculators"
            )
        return "artifact"
    found = [kind for kind in _KINDS[wanted] if _has(source, kind)]
    if len(found) == 1:
        return found[0]
    if found:
        raise EagleError(
            f"{source.uri} holds files of several kinds ({', '.join(found)}): give the folder of one of "
            "them, or choose with --format"
        )
    raise EagleError(f"{source.uri} {_unlike(source, wanted)}: eagle convert reads {_READS}")


def sample_files(source: Source, kind: Kind) -> list[SampleFile]:
    """The files of hidden states, in the order of their numbers.

    Raises:
        EagleError: two files have the same number.
    """
    matches = [(_SAMPLES[kind].fullmatch(name), name) for name in source.sizes]
    files = sorted(
        (SampleFile(name, int(match[1])) for match, name in matches if match), key=lambda file: file.number
    )
    for one, other in pairwise(files):
        if one.number == other.number:
            raise EagleError(
                f"{source.uri} has sample {one.number} twice, as {one.name} and {other.name}: remove one"
            )
    return files


def _has(source: Source, kind: Kind) -> bool:
    if kind == "head":
        return "config.json" in source.sizes and any(_HEAD_WEIGHTS.fullmatch(name) for name in source.sizes)
    return any(_SAMPLES[kind].fullmatch(name) for name in source.sizes)


def _unlike(source: Source, wanted: Format) -> str:
    """What the folder is instead, as far as its names tell."""
    if any(name.endswith("training_state.pt") for name in source.sizes):
        return "is a SpecForge training checkpoint, not an exported head (export it with SpecForge first)"
    if wanted != "auto":
        return f"holds nothing of --format {wanted}"
    first = ", ".join(sorted(source.sizes)[:3])
    return f"holds nothing known ({first}{', ...' if len(source.sizes) > 3 else ''})"
