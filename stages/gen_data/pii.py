"""Scrubbing: personal data in a prompt becomes a placeholder; a prompt that cannot be scanned is dropped."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stages.prompts import Prompt

if TYPE_CHECKING:
    from presidio_analyzer import AnalyzerEngine

MAX_SCAN_CHARS = 20_000
"""Texts longer than this are not scanned, and so dropped: a scan of one could take minutes."""

# What every finding has: an @, the colons of an IPv6 address, or the four digits of an IPv4 address.
_WORTH_SCANNING = re.compile(r"@|:[^:]*:|\d\D*\d\D*\d\D*\d")


@dataclass(frozen=True)
class Finding:
    """A stretch [start, end) of a text, and the kind of personal data in it, such as "EMAIL_ADDRESS"."""

    start: int
    end: int
    entity: str
    score: float


@dataclass
class Scrubber:
    """Scrubs prompts and keeps count, by kind and never by text.

    Attributes:
        found: findings by entity, over all prompts that could be scanned.
    """

    found: Counter[str] = field(default_factory=Counter)
    _analyzer: AnalyzerEngine | None = None

    def scrub(self, prompt: Prompt) -> Prompt | None:
        """The prompt with placeholders for personal data; None if it is too long or the analyzer fails."""
        if (
            self._analyzer is None
        ):  # outside of the try below: an installation that is broken must not pass for text
            from stages.gen_data.recognizers import make_analyzer

            self._analyzer = make_analyzer()
        texts = (prompt.system, *prompt.turns)
        if max(map(len, texts)) > MAX_SCAN_CHARS:
            return None
        try:
            findings = [self._scan(text) for text in texts]
        except Exception:  # whatever went wrong, unscanned text must not pass; the message may quote it
            return None
        self.found.update(finding.entity for scanned in findings for finding in scanned)
        system, *turns = (redact(text, scanned) for text, scanned in zip(texts, findings, strict=True))
        return replace(prompt, system=system, turns=tuple(turns))

    def _scan(self, text: str) -> list[Finding]:
        if not _WORTH_SCANNING.search(text):
            return []
        from presidio_analyzer.pattern_recognizer import REGEX_TIMEOUT_SECONDS

        from stages.gen_data.recognizers import LANGUAGE

        assert self._analyzer is not None
        start = time.monotonic()
        results = self._analyzer.analyze(text, LANGUAGE)
        if time.monotonic() - start >= REGEX_TIMEOUT_SECONDS:
            # presidio leaves out an expression that times out, and says so in a log only.
            raise TimeoutError("a recognizer may not have finished")
        return resolve([Finding(r.start, r.end, r.entity_type, r.score) for r in results])


def resolve(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that overlap become one that covers them all, named after the one with the best score.

    Between equal scores the longer one names it, then the first by name. The result is in order of position.
    """
    merged: list[list[Finding]] = []
    end = -1
    for finding in sorted(findings, key=lambda f: (f.start, f.end, f.entity)):
        if merged and finding.start < end:
            merged[-1].append(finding)
        else:
            merged.append([finding])
        end = max(end, finding.end)
    return [_cover(group) for group in merged]


def _cover(group: list[Finding]) -> Finding:
    best = min(group, key=lambda f: (-f.score, f.start - f.end, f.entity))
    return replace(best, start=min(f.start for f in group), end=max(f.end for f in group))


def redact(text: str, findings: list[Finding]) -> str:
    """`text` with `<ENTITY>` in place of each finding; they must not overlap."""
    for finding in sorted(findings, key=lambda f: f.start, reverse=True):
        text = f"{text[: finding.start]}<{finding.entity}>{text[finding.end :]}"
    return text
