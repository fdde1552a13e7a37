"""A finding: where in a text something personal or secret is. It never holds the text itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

SECRET = "SECRET"


@dataclass(frozen=True, slots=True)
class Finding:
    """A stretch [start, end) of a text, and the kind of personal data in it, such as "EMAIL_ADDRESS".

    Attributes:
        form: what it looks like more exactly, such as "AWS access key"; "" where there is nothing to add.
    """

    start: int
    end: int
    entity: str
    score: float
    form: str = ""


def resolve(findings: Iterable[Finding], first: frozenset[str] = frozenset({SECRET})) -> list[Finding]:
    """Findings that overlap become one that covers them all, named after the one with the best score.

    Between equal scores the longer one names it, then the first by name. The result is in order of position.

    Args:
        first: entities that name what they overlap whatever the scores: those whose rows are dropped.
    """
    merged: list[list[Finding]] = []
    end = -1
    for finding in sorted(findings, key=lambda f: (f.start, f.end, f.entity)):
        if merged and finding.start < end:
            merged[-1].append(finding)
        else:
            merged.append([finding])
        end = max(end, finding.end)
    return [_cover(group, first) for group in merged]


def _cover(group: Sequence[Finding], first: frozenset[str]) -> Finding:
    best = min(group, key=lambda f: (f.entity not in first, -f.score, f.start - f.end, f.entity, f.form))
    return replace(best, start=min(f.start for f in group), end=max(f.end for f in group))


def redact(text: str, findings: Iterable[Finding]) -> str:
    """`text` with `<ENTITY>` in place of each finding; they must not overlap."""
    for finding in sorted(findings, key=lambda f: f.start, reverse=True):
        text = f"{text[: finding.start]}<{finding.entity}>{text[finding.end :]}"
    return text


def mask(text: str) -> str:
    """The shape of a text: letters become a or A, digits 0, other characters stay if they show."""
    return "".join(map(_shape, text))


def _shape(character: str) -> str:
    if character.isalpha():
        return "A" if character.isupper() else "a"
    if character.isalnum():
        return "0"
    return character if character.isprintable() else "."
