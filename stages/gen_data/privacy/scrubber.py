"""What happens to prompts and answers with personal data: a placeholder, a mark, or out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from stages.gen_data.privacy.detector import Detector, Scan, Unscannable, make_detector
from stages.gen_data.privacy.finding import SECRET, Finding, redact
from stages.gen_data.privacy.pool import scan_rows
from stages.gen_data.privacy.report import PrivacyReport
from stages.gen_data.privacy.rules import Search

if TYPE_CHECKING:
    from stages.gen_data.privacy.config import PrivacyConfig
    from stages.prompts import Prompt

FOUND, MANY, IN_ANSWER = "personal_data", "much_personal_data", "personal_data_in_answer"
"""Why prompts are left out, besides `secret` and the entities whose rows are dropped, and
`unscannable_...`."""


class Answered(Protocol):
    """A dialogue whose answers are to be searched."""

    prompt: Prompt
    messages: list[dict[str, str]]

    def withdraw(self, reason: str) -> None: ...


class Scrubber:
    """Searches prompts and answers, and decides which may be used; keeps count, by kind and never by text.

    Attributes:
        found: findings in prompts, by source and entity, those of prompts left out too.
        rows: prompts with findings that are used, redacted or flagged, by source.
        in_answers: findings in answers, by source and entity, since they were last taken.
    """

    def __init__(self, config: PrivacyConfig) -> None:
        """Raises EagleError: the rules of --pii-config cannot be read."""
        self._config = config
        self._search = Search.of(config)
        self._report = PrivacyReport(config.pii_report) if config.pii_report and config.pii != "off" else None
        self.found: dict[str, Counter[str]] = {}
        self.rows: Counter[str] = Counter()
        self.in_answers: dict[str, Counter[str]] = {}

    @cached_property
    def _detector(self) -> Detector:
        return make_detector(self._search)

    def settings(self) -> dict[str, str]:
        """For the artifact's configuration: what searched, and a digest of all that decides what it finds.

        Raises:
            EagleError: the search cannot be made ready.
        """
        if self._config.pii == "off":
            return {}
        return {"pii_analyzer": self._search.version, "pii_digest": self._search.digest}

    def scrubbed(
        self, prompts: Iterable[Prompt], leave_out: Callable[[str, str], None], wanted: int | None = None
    ) -> Iterator[Prompt]:
        """The prompts that may be used, with placeholders under `redact`, in their order.

        Args:
            leave_out: called with source and reason of each one that may not.
            wanted: how many are taken at most; None if all are.

        Raises:
            EagleError: the search cannot be made ready, or breaks down.
        """
        if self._config.pii == "off":
            yield from prompts
            return
        scanned = scan_rows(prompts, _texts, self._search, self._detector, wanted)
        for prompt, scans in scanned:
            reason, clean = self._decide(prompt, scans)
            if clean is None:
                leave_out(prompt.source, reason)
            else:
                yield clean

    def _decide(self, prompt: Prompt, scans: Sequence[Scan]) -> tuple[str, Prompt | None]:
        """Why the prompt is left out and None, or no reason and the prompt to use."""
        places = ("system", "tools", *(f"turn {number + 1}" for number in range(len(prompt.turns))))
        if broken := _first_unscannable(scans):
            self._note(prompt.id, prompt.source, places, _texts(prompt), scans)
            return f"unscannable_{broken.reason}", None
        findings = [finding for scan in scans if isinstance(scan, list) for finding in scan]
        if not findings:
            return "", prompt
        self.found.setdefault(prompt.source, Counter()).update(finding.entity for finding in findings)
        self._note(prompt.id, prompt.source, places, _texts(prompt), scans)
        if self._config.pii == "flag":
            self.rows[prompt.source] += 1
            return "", prompt
        if self._config.pii == "drop":
            return _worst(findings, self._search.rules.drop) or FOUND, None
        if reason := _worst(findings, self._search.rules.drop):
            return reason, None
        if len(findings) > self._search.rules.max_findings:
            return MANY, None
        system, tools, *turns = (
            redact(text, scan)
            for text, scan in zip(_texts(prompt), scans, strict=True)
            if isinstance(scan, list)
        )
        if tools != prompt.tools and not _is_json(tools):
            return FOUND, None
        self.rows[prompt.source] += 1
        return "", replace(prompt, system=system, tools=tools, turns=tuple(turns))

    def check_answers(self, dialogues: Sequence[Answered]) -> None:
        """Withdraws the dialogues with a finding in an answer, or an answer that cannot be searched.

        Text and token ids of an answer must stay the same, so nothing is replaced in it. Under `flag`
        findings are only counted.

        Raises:
            EagleError: the search breaks down.
        """
        if self._config.pii == "off" or not self._config.pii_responses:
            return
        answers = [_answers(dialogue.messages) for dialogue in dialogues]
        scans = iter(self._detector.scan([text for texts in answers for text in texts]))
        for dialogue, texts in zip(dialogues, answers, strict=True):
            own = [next(scans) for _ in texts]
            findings = [finding for scan in own if isinstance(scan, list) for finding in scan]
            broken = _first_unscannable(own)
            if not findings and not broken:
                continue
            source = dialogue.prompt.source
            self.in_answers.setdefault(source, Counter()).update(finding.entity for finding in findings)
            places = [f"answer {number + 1}" for number in range(len(texts))]
            self._note(dialogue.prompt.id, source, places, texts, own)
            if broken:
                dialogue.withdraw(f"unscannable_answer_{broken.reason}")
            elif self._config.pii != "flag":
                dialogue.withdraw(IN_ANSWER)

    def counts(self) -> dict[str, Any]:
        """What was found in prompts, for the manifest."""
        total: Counter[str] = Counter()
        for counts in self.found.values():
            total.update(counts)
        return {
            "pii": dict(sorted(total.items())),
            "pii_by_source": _plain(self.found),
            "pii_rows": dict(sorted(self.rows.items())),
        }

    def take_answer_counts(self) -> dict[str, Any]:
        """What was found in answers since this was last asked, for a shard's note; adds up to the
        manifest's."""
        taken, self.in_answers = _plain(self.in_answers), {}
        return {"pii_in_answers": taken}

    def forget_prompts(self) -> None:
        """Counts nothing of the prompts: another part of the job array does."""
        self.found, self.rows = {}, Counter()

    def refuse_report(self) -> None:
        """Raises EagleError: --pii-report would replace a file that is no such report."""
        if self._report is not None:
            self._report.refuse_other_file()

    def write_report(self) -> None:
        """Writes the sample of --pii-report, if one was asked for.

        Raises:
            EagleError: the file cannot be written.
        """
        if self._report is not None:
            self._report.write()

    def _note(
        self, row: str, source: str, places: Sequence[str], texts: Sequence[str], scans: Sequence[Scan]
    ) -> None:
        if self._report is not None:
            for place, text, scan in zip(places, texts, scans, strict=True):
                self._report.add(row, source, place, text, scan)


def _texts(prompt: Prompt) -> tuple[str, ...]:
    return (prompt.system, prompt.tools, *prompt.turns)


def _answers(messages: Iterable[dict[str, str]]) -> list[str]:
    """All that the target said: the answers, and reasoning where a template keeps it apart."""
    return [
        text
        for message in messages
        if message["role"] == "assistant"
        for name, text in message.items()
        if name != "role" and isinstance(text, str)
    ]


def _first_unscannable(scans: Iterable[Scan]) -> Unscannable | None:
    return next((scan for scan in scans if isinstance(scan, Unscannable)), None)


def _worst(findings: Iterable[Finding], drop: Sequence[str]) -> str:
    """The reason for leaving a prompt out at once, "" if there is none: `secret`, or the entity's name."""
    entities = {finding.entity for finding in findings}
    if SECRET in entities and SECRET in drop:
        return "secret"
    return next((entity.lower() for entity in drop if entity in entities), "")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _plain(counts: dict[str, Counter[str]]) -> dict[str, dict[str, int]]:
    return {source: dict(sorted(by_entity.items())) for source, by_entity in sorted(counts.items())}
