"""How good the search is: recall by entity and false positives on our labelled texts, and on prompts of
yours.

python -m stages.gen_data.privacy.evaluate [--prompts SRC]... [--missed]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stages.gen_data.privacy.config import PrivacyConfig
from stages.gen_data.privacy.detector import Detector, Unscannable, make_detector
from stages.gen_data.privacy.finding import Finding
from stages.gen_data.privacy.labelled import Case, read_cases
from stages.gen_data.privacy.rules import Search


@dataclass
class Quality:
    """What a detector made of labelled texts.

    Attributes:
        expected, found: by entity, how many there are, and how many of them were found whole and under that
        name. harmless, flagged: texts without findings, and how many of them had some all the same.
        invented: findings that touch nothing that was marked, in texts with marks.
        missed, wrong: the cases where it went wrong, for a person to look at.
    """

    expected: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    harmless: int = 0
    flagged: int = 0
    invented: int = 0
    missed: list[Case] = field(default_factory=list)
    wrong: list[Case] = field(default_factory=list)

    @property
    def recall(self) -> float:
        return self.found.total() / self.expected.total() if self.expected else 1.0

    @property
    def false_positive_rate(self) -> float:
        return self.flagged / self.harmless if self.harmless else 0.0


def evaluate(detector: Detector, cases: Sequence[Case]) -> Quality:
    """Compares what a detector finds with what is marked."""
    quality = Quality()
    for case, scan in zip(cases, detector.scan([case.text for case in cases]), strict=True):
        findings = [] if isinstance(scan, Unscannable) else scan
        if not case.expected:
            quality.harmless += 1
            if findings or isinstance(scan, Unscannable):
                quality.flagged += 1
                quality.wrong.append(case)
            continue
        for entity, start, end in case.expected:
            quality.expected[entity] += 1
            if any(f.entity == entity and f.start <= start and end <= f.end for f in findings):
                quality.found[entity] += 1
            else:
                quality.missed.append(case)
        invented = sum(not _touches(finding, case.expected) for finding in findings)
        quality.invented += invented
        if invented:
            quality.wrong.append(case)
    return quality


def _touches(finding: Finding, marked: Iterable[tuple[str, int, int]]) -> bool:
    return any(finding.start < end and start < finding.end for _, start, end in marked)


def table(quality: Quality) -> str:
    """Recall by entity and the rate of false positives, as lines of text."""
    lines = [f"{'entity':<16}{'marked':>8}{'found':>8}{'recall':>9}"]
    for entity, expected in sorted(quality.expected.items()):
        found = quality.found[entity]
        lines.append(f"{entity:<16}{expected:>8}{found:>8}{found / expected:>9.1%}")
    total = quality.expected.total()
    lines.append(f"{'all':<16}{total:>8}{quality.found.total():>8}{quality.recall:>9.1%}")
    lines.append(
        f"harmless texts: {quality.harmless}, with a finding: {quality.flagged} "
        f"({quality.false_positive_rate:.1%}); "
        f"findings beside the marks: {quality.invented}"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.gen_data.privacy.evaluate", description=__doc__)
    parser.add_argument(
        "--prompts", action="append", default=[], metavar="SRC", help="prompts to count findings in"
    )
    parser.add_argument("--pii-entities", action="append", metavar="NAME", help="as for eagle gen-data")
    parser.add_argument("--pii-config", metavar="YAML", help="as for eagle gen-data")
    parser.add_argument("--missed", action="store_true", help="show the labelled texts that went wrong")
    given = parser.parse_args(arguments)
    config = PrivacyConfig(pii_config=given.pii_config, pii_entities=given.pii_entities or ["default"])
    detector = make_detector(Search.of(config))
    quality = evaluate(detector, read_cases())
    lines = [table(quality)]
    if given.missed:
        lines += [f"missed: {case.text!r}" for case in quality.missed]
        lines += [f"wrong: {case.text!r}" for case in quality.wrong]
    for source in given.prompts:
        lines.append(_count(detector, source))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _count(detector: Detector, source: str) -> str:
    from stages.prompts import Prompt, iter_prompts

    rows, flagged, unscannable = 0, 0, 0
    found: Counter[str] = Counter()
    for prompt in iter_prompts(source):
        if not isinstance(prompt, Prompt):
            continue
        rows += 1
        scans = detector.scan([prompt.system, *prompt.turns])
        findings = [finding for scan in scans if isinstance(scan, list) for finding in scan]
        unscannable += any(isinstance(scan, Unscannable) for scan in scans)
        flagged += bool(findings)
        found.update(finding.entity for finding in findings)
    kinds = ", ".join(f"{n:,} {entity}" for entity, n in sorted(found.items())) or "none"
    return (
        f"{source}: {rows:,} prompts, with a finding: {flagged:,} ({flagged / max(rows, 1):.2%}), "
        f"not searchable: {unscannable:,}; {kinds}"
    )


if __name__ == "__main__":
    sys.exit(main())
