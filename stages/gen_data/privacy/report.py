"""A sample of the findings for a person to check, with everything that was found masked."""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from stages.errors import EagleError
from stages.gen_data.privacy.detector import Scan, Unscannable
from stages.gen_data.privacy.finding import Finding, mask

SAMPLE = 100
"""Findings of a kind in the report, drawn at random from all of them."""

SURROUNDINGS = 40
_FIELDS = {"id", "source", "where"}
_LONGEST_LINE = 1 << 20
_LONG = 16
_WORD = re.compile(r"[^\s\"'()<>,;:]+")
_DIGITS = re.compile(r"\d")


@dataclass
class PrivacyReport:
    """Keeps some findings of each kind, at random but the same in every run, and writes them as JSON Lines.

    A line has `id`, `source`, `where` in the row, `entity`, `form`, `score` and `text`: the finding and what
    stands around it. Of findings only the shape is shown, letters as a or A and digits as 0; around them
    numbers, long words and words that begin with a capital are masked likewise. A row that could not be
    searched has `unscannable` and `error` instead.
    """

    uri: str
    _kept: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def add(self, row: str, source: str, where: str, text: str, scan: Scan) -> None:
        """Takes what came of one text of a row."""
        place = {"id": row, "source": source, "where": where}
        if isinstance(scan, Unscannable):
            self._keep(scan.reason, place | {"unscannable": scan.reason, "error": scan.error})
            return
        for finding in scan:
            line: dict[str, str | float] = {
                **place,
                "entity": finding.entity,
                "form": finding.form,
                "score": finding.score,
                "text": _shown(text, finding, scan),
            }
            self._keep(finding.entity, line, finding.start)

    def _keep(self, kind: str, line: Mapping[str, str | float], start: int = 0) -> None:
        key = hashlib.sha256(f"{line['source']}\0{line['id']}\0{line['where']}\0{start}".encode()).hexdigest()
        kept = self._kept.setdefault(kind, [])
        entry = (key, json.dumps(line, ensure_ascii=False))
        if len(kept) < SAMPLE:
            heapq.heappush(kept, entry)
        else:
            heapq.heappushpop(kept, entry)  # the largest keys stay, which is as random as any others

    def lines(self) -> list[str]:
        """The sample by kind, in a random order that is always the same."""
        return [line for _, kept in sorted(self._kept.items()) for _, line in sorted(kept)]

    def refuse_other_file(self) -> None:
        """Raises EagleError: what is at the URI is no such report, and writing would destroy it."""
        from stages.artifacts.uri import filesystem, storage_errors

        fs, path = filesystem(self.uri)
        with storage_errors(self.uri):
            if not fs.exists(path):
                return
            if fs.isdir(path):
                raise EagleError(f"--pii-report {self.uri} is a folder: give the name of a file")
            with fs.open(path) as file:
                first = file.readline(_LONGEST_LINE)
        try:
            line = json.loads(first) if first else {}
            is_report = not first or line.keys() >= _FIELDS
        except (AttributeError, ValueError):
            is_report = False
        if not is_report:
            raise EagleError(
                f"--pii-report {self.uri} is a file that holds something else: give the name of a new file"
            )

    def write(self) -> None:
        """Raises EagleError: the file cannot be written."""
        from stages.artifacts.uri import filesystem, local_path, storage_errors

        fs, path = filesystem(self.uri)
        with storage_errors(self.uri):
            if (local := local_path(self.uri)) is not None:
                local.parent.mkdir(parents=True, exist_ok=True)
            fs.pipe_file(path, "".join(line + "\n" for line in self.lines()).encode())


def _shown(text: str, finding: Finding, others: list[Finding]) -> str:
    """The finding with its surroundings; what was found anywhere in them is masked, and what may belong to
    it."""
    for other in others:
        text = text[: other.start] + mask(text[other.start : other.end]) + text[other.end :]
    start, end = max(0, finding.start - SURROUNDINGS), finding.end + SURROUNDINGS
    parts = (
        _around(text[start : finding.start]),
        text[finding.start : finding.end],
        _around(text[finding.end : end]),
    )
    return "".join(parts)


def _around(text: str) -> str:
    return _DIGITS.sub(
        "0", _WORD.sub(lambda match: mask(match[0]) if _may_tell(match[0]) else match[0], text)
    )


def _may_tell(word: str) -> bool:
    """Whether a word beside a finding may be a name, a part of an address or the rest of a secret."""
    return word[0].isupper() or len(word) >= _LONG or "." in word[:-1]
